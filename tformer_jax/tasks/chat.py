"""Supervised tuning: the assistant's messages in conversations, given what is said before them."""

from collections.abc import Sequence
from typing import Any

from tformer_jax.config import Config
from tformer_jax.tasks.language_model import LanguageModel
from tformer_jax.tasks.token_prediction import TokenPrediction


class Chat(LanguageModel):
    """Predicts each token of the assistant's messages from the tokens before it."""

    keys = ("messages",)
    batchings = ("packed",)
    label_settings = ("data.chat_template", "model.max_length")

    def check_fit(self, cfg: Config) -> None:
        super().check_fit(cfg)
        if cfg.model.prefix_lm:
            raise cfg.model.error("prefix_lm", "must be False for task='chat', whose answers are predicted causally")
        for name, neutral in {"normalize": (), "transforms": (), "long_documents": "split"}.items():
            if getattr(cfg.data, name) != neutral:
                raise cfg.data.error(name, f"must be {neutral!r} for task='chat', whose template writes the texts")
        if cfg.data.clean_whitespace:
            raise cfg.data.error("clean_whitespace", "must be None or False for task='chat', whose texts have lines")

    def evaluators(self, parts: Any) -> Sequence[Any]:
        """Returns evaluators of the likelihood of answers, and of answers to held-out conversations."""
        from tformer_jax.tasks.evaluators.continuations import AnswerEvaluator

        answers = AnswerEvaluator(parts.cfg, parts.model, parts.tokenizers, parts.examples)
        return [*TokenPrediction.evaluators(self, parts), answers]


CHAT = Chat()
