"""Language models: each token of a document from the tokens before it."""

from collections.abc import Sequence
from typing import Any, ClassVar

from tformer_jax.config import Config
from tformer_jax.config.metrics import PER_TEXT_SIZE, PER_TOKEN
from tformer_jax.tasks.token_prediction import TokenPrediction


class LanguageModel(TokenPrediction):
    """Predicts each token of a document from the tokens before it."""

    family = "decoder_lm"
    metrics: ClassVar[tuple[str, ...]] = (*PER_TOKEN, *PER_TEXT_SIZE)
    batchings: ClassVar[tuple[str, ...]] = ("windows", "packed")
    verb = "generate"
    verbs = ("generate", "outputs", "score")
    route = "/v1/completions"
    generates = True
    label_settings: ClassVar[tuple[str, ...]] = ("data.batching", "model.prefix_lm")

    def check_metric(self, cfg: Config) -> None:
        """As `Task.check_metric`; a prefix LM does not predict all tokens of a text."""
        super().check_metric(cfg)
        if cfg.train.metric in PER_TEXT_SIZE and cfg.model.prefix_lm:
            raise cfg.train.error(
                "metric", "must be 'loss' for model.prefix_lm=True, which predicts a part of each text"
            )

    def evaluators(self, parts: Any) -> Sequence[Any]:
        """Returns evaluators of the likelihood of documents, and of continuations."""
        from tformer_jax.tasks.evaluators.continuations import ContinuationEvaluator
        from tformer_jax.tasks.evaluators.perplexity import PerplexityEvaluator

        normalize = parts.tokenizers.target.normalize
        predicted = () if parts.cfg.model.prefix_lm else map(normalize, (example["text"] for example in parts.examples))
        continuations = ContinuationEvaluator(parts.cfg, parts.model, parts.tokenizers, parts.examples)
        alone = parts.cfg.data.batching != "windows"
        return [PerplexityEvaluator(parts.likelihood, texts=predicted, alone=alone), continuations]


LANGUAGE_MODEL = LanguageModel()
