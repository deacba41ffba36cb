"""Mean loss and accuracy over a whole split."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.inference.sampling import most_probable
from tformer_jax.models import registry
from tformer_jax.models.losses import masked_cross_entropy
from tformer_jax.nn.sharding import whole
from tformer_jax.parallel.placement import everywhere, mesh_of, shard_batch
from tformer_jax.special_tokens import IGNORED

Batch = Mapping[str, np.ndarray]
Batches = Callable[[], Iterable[Batch]]

BATCHES_AHEAD = 4
"""Batches that may wait for the device: enough to keep it busy, few enough to fit beside each other."""
KEPT_BYTES = 2**28
"""The largest split whose batches are kept for the next evaluation."""


class Likelihood:
    """Sums over all batches, divided once: neither batch size nor padding changes the result."""

    def __init__(self, model: nn.Module, batches: Batches):
        self._model, self._batches = model, batches
        self._kept: list[Batch] | None = None

    def __call__(self, params: Any) -> tuple[float, float]:
        """Nats a label, and the percentage of labels that are the most probable ones."""
        totals, mesh = np.zeros(3), mesh_of(params)
        computing: collections.deque[jax.Array] = collections.deque()
        with everywhere(mesh):
            for batch in self._all_batches():
                computing.append(_sums(self._model, params, shard_batch(mesh, batch)))
                if len(computing) > BATCHES_AHEAD:
                    totals += np.asarray(computing.popleft())
            for sums in computing:
                totals += np.asarray(sums)
        loss, hits, count = totals.tolist()
        return loss / count, 100 * hits / count

    def _all_batches(self) -> Iterator[Batch]:
        """The batches, which are made once if they are small enough to keep."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Batch] = []
        room = KEPT_BYTES
        for batch in self._batches():
            room -= sum(array.nbytes for array in batch.values())
            if room >= 0:
                kept.append(batch)
            yield batch
        self._kept = kept if room >= 0 else None


@functools.partial(jax.jit, static_argnames="model")
def _sums(model: nn.Module, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Summed loss, number of right predictions and number of labels of one batch: float32 [3], exact to 2^24 labels."""
    logits, labels, _ = registry.forward(model, params, batch)
    sums = masked_cross_entropy(logits, labels)
    hits = ((most_probable(logits) == labels) & (labels != IGNORED)).sum()
    return whole(jnp.stack([sums.loss, hits, sums.labels]).astype(jnp.float32))
