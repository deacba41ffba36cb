"""Evaluation of the prediction of tokens."""

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from tformer_jax.config.metrics import PER_TEXT_SIZE
from tformer_jax.tasks.evaluators.directions import by_direction, with_means
from tformer_jax.tasks.evaluators.evaluation import Evaluation
from tformer_jax.tasks.evaluators.likelihood import Likelihood


class PerplexityEvaluator:
    """Predicts each token from the reference tokens before it (teacher forcing), or masked tokens from the others.

    Args:
        directions: the direction of each row of the batches, in the order of the examples; None: the row has none.
        trained: as for `evaluate_directions`.
        texts: the texts, normalized, whose tokens are predicted; () if there are none.
        alone: whether each text is predicted without the texts before it, so that its first token has no loss;
            otherwise, only the first token of the first text has none.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        directions: Sequence[str | None] = (),
        trained: Collection[str] = (),
        *,
        texts: Iterable[str] = (),
        alone: bool = False,
    ):
        self._likelihood, self._places, self._trained = likelihood, by_direction(directions), trained
        self._texts, self._alone = texts, alone

    @functools.cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """The numbers of bytes, in UTF-8, of characters, and of tokens without a loss, of all texts."""
        sizes = [(len(text.encode("utf-8", "surrogatepass")), len(text)) for text in self._texts if text]
        first = len(sizes) if self._alone else 1
        return sum(size for size, _ in sizes), sum(size for _, size in sizes), first

    def __call__(self, params: Any) -> Evaluation:
        """Returns `loss` in nats per token, `perplexity` = exp(loss) and `token_accuracy` in percent.

        Texts also have `bits_per_byte` and `bits_per_character`: the sum of the losses of all tokens, divided by the
        size of the texts. First tokens, which have no loss, count with the mean loss of the others.

        Means are over all tokens. `loss:en-de` is the loss of one direction; `loss:to-en` averages the losses of the
        directions in a group.
        """
        loss, accuracy, losses, sums = self._likelihood(params)
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(loss))
        metrics = {"loss": loss, "perplexity": perplexity, "token_accuracy": accuracy}
        *sizes, first = self._sizes
        for name, size in zip(PER_TEXT_SIZE, sizes, strict=True):
            if size:
                metrics[name] = loss * (float(sums[:, 2].sum()) + first) / math.log(2) / size
        parts = {
            name: {"loss": float(sums[places, 0].sum() / sums[places, 2].sum())}
            for name, places in self._places.items()
            if name is not None and sums[places, 2].any()
        }
        return Evaluation(with_means(parts, self._trained) | metrics if parts else metrics, losses=losses)
