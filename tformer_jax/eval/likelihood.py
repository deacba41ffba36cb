"""Mean loss and accuracy over a whole split."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.inference.sampling import most_probable
from tformer_jax.models import registry
from tformer_jax.models.losses import masked_cross_entropy
from tformer_jax.nn.sharding import whole
from tformer_jax.parallel.placement import everywhere, mesh_of, spread
from tformer_jax.special_tokens import IGNORED

Batches = Callable[[], Iterable[Mapping[str, np.ndarray]]]


class Likelihood:
    """Sums over all batches, divided once: neither batch size nor padding changes the result."""

    def __init__(self, model: nn.Module, batches: Batches):
        self._model, self._batches = model, batches

    def __call__(self, params: Any) -> tuple[float, float]:
        """Nats a label, and the percentage of labels that are the most probable ones."""
        totals, mesh = np.zeros(3), mesh_of(params)
        with everywhere(mesh):
            for batch in self._batches():
                sums = _sums(self._model, params, spread(mesh, batch))
                totals += np.array(jax.device_get(sums), np.float64)
        loss, hits, count = totals.tolist()
        return loss / count, 100 * hits / count


@functools.partial(jax.jit, static_argnames="model")
def _sums(model: nn.Module, params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Summed loss, number of right predictions and number of labels of one batch."""
    logits, labels, _ = registry.forward(model, params, batch)
    sums = masked_cross_entropy(logits, labels)
    hits = ((most_probable(logits) == labels) & (labels != IGNORED)).sum()
    return whole(sums.loss), whole(hits), whole(sums.labels)
