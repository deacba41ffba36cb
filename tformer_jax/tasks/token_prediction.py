"""What tasks that predict tokens share."""

from collections.abc import Sequence
from typing import Any, ClassVar

from tformer_jax.config.metrics import PER_TOKEN
from tformer_jax.tasks.task import Task


class TokenPrediction(Task):
    """Predicts tokens, and is evaluated by their likelihood."""

    metrics: ClassVar[tuple[str, ...]] = PER_TOKEN

    def evaluators(self, parts: Any) -> Sequence[Any]:
        """Returns the evaluator of the likelihood of the labels."""
        from tformer_jax.tasks.evaluators.perplexity import PerplexityEvaluator

        return [PerplexityEvaluator(parts.likelihood)]
