"""Mean loss and accuracy over a split."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.inference.sampling import most_probable
from tformer_jax.models import registry
from tformer_jax.models.losses import masked_cross_entropy
from tformer_jax.nn.sharding import replicate
from tformer_jax.parallel.placement import everywhere, mesh_of, shard_batch
from tformer_jax.special_tokens import IGNORED

Batch = Mapping[str, np.ndarray]
Batches = Callable[[], Iterable[Batch]]

MAX_PENDING_BATCHES = 4
"""Maximum number of batches dispatched to the device ahead of their results; bounds memory."""
CACHED_BYTES = 2**28
"""Maximum size of a split, in bytes, whose batches are cached for the next evaluation."""


class Likelihood:
    """Sums over all batches and divides once, so that batch size and padding do not change the result."""

    def __init__(self, model: nn.Module, batches: Batches, own: Sequence[int] | None = None):
        """Evaluates `model` on `batches`, which have all rows, or those of the batch shards `own` (`shard_batch`)."""
        self._model, self._batches, self._own = model, batches, own
        self._cached: list[Batch] | None = None

    def __call__(self, params: Any) -> tuple[float, float]:
        """Returns the mean loss in nats per label, and the percentage of labels predicted correctly."""
        totals, mesh = np.zeros(3), mesh_of(params)
        pending: collections.deque[jax.Array] = collections.deque()
        with everywhere(mesh):
            for batch in self._all_batches():
                pending.append(_sums(self._model, params, shard_batch(mesh, batch, self._own)))
                if len(pending) > MAX_PENDING_BATCHES:
                    totals += np.asarray(pending.popleft())
            for sums in pending:
                totals += np.asarray(sums)
        loss, hits, count = totals.tolist()
        return loss / count, 100 * hits / count

    def _all_batches(self) -> Iterator[Batch]:
        """Yields the batches, caching them if they are at most `CACHED_BYTES`."""
        if self._cached is not None:
            yield from self._cached
            return
        cached: list[Batch] = []
        size = 0
        for batch in self._batches():
            size += sum(array.nbytes for array in batch.values())
            if size <= CACHED_BYTES:
                cached.append(batch)
            yield batch
        self._cached = cached if size <= CACHED_BYTES else None


@functools.partial(jax.jit, static_argnames="model")
def _sums(model: nn.Module, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the summed loss and the numbers of correct predictions and of labels: float32 [3], exact to 2^24."""
    logits, labels, _ = registry.forward(model, params, batch)
    sums = masked_cross_entropy(logits, labels)
    hits = ((most_probable(logits) == labels) & (labels != IGNORED)).sum()
    return replicate(jnp.stack([sums.loss, hits, sums.labels]).astype(jnp.float32))
