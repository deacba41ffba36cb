"""Language models: each token of a document from the tokens before it."""

from collections.abc import Sequence
from typing import Any, ClassVar

from tformer_jax.tasks.token_prediction import TokenPrediction


class LanguageModel(TokenPrediction):
    """Predicts each token of a document from the tokens before it."""

    family = "decoder_lm"
    batchings: ClassVar[tuple[str, ...]] = ("windows", "packed")
    verb = "generate"
    verbs = ("generate", "outputs", "score")
    route = "/v1/completions"
    generates = True
    label_settings: ClassVar[tuple[str, ...]] = ("data.batching", "model.prefix_lm")

    def evaluators(self, parts: Any) -> Sequence[Any]:
        """Returns evaluators of the likelihood of documents, and of continuations."""
        from tformer_jax.tasks.evaluators.continuations import ContinuationEvaluator

        continuations = ContinuationEvaluator(parts.cfg, parts.model, parts.tokenizers, parts.examples)
        return [*super().evaluators(parts), continuations]


LANGUAGE_MODEL = LanguageModel()
