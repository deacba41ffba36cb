"""Evaluation of the prediction of tokens."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tformer_jax.tasks.evaluators.directions import by_direction, with_means
from tformer_jax.tasks.evaluators.evaluation import Evaluation
from tformer_jax.tasks.evaluators.likelihood import Likelihood


class PerplexityEvaluator:
    """Predicts each token from the reference tokens before it (teacher forcing), or masked tokens from the others.

    Args:
        directions: the direction of each row of the batches, in the order of the examples; None: the row has none.
        trained: as for `evaluate_directions`.
    """

    def __init__(self, likelihood: Likelihood, directions: Sequence[str | None] = (), trained: Collection[str] = ()):
        self._likelihood, self._places, self._trained = likelihood, by_direction(directions), trained

    def __call__(self, params: Any) -> Evaluation:
        """Returns `loss` in nats per token, `perplexity` = exp(loss) and `token_accuracy` in percent.

        They are means over all tokens; `loss:en-de` is that of a direction, `loss:to-en` the mean of those of a group.
        """
        loss, accuracy, losses, sums = self._likelihood(params)
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(loss))
        metrics = {"loss": loss, "perplexity": perplexity, "token_accuracy": accuracy}
        parts = {
            name: {"loss": float(sums[places, 0].sum() / sums[places, 2].sum())}
            for name, places in self._places.items()
            if name is not None and sums[places, 2].any()
        }
        return Evaluation(with_means(parts, self._trained) | metrics if parts else metrics, losses=losses)
