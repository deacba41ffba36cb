"""Mean loss and accuracy over a split."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.data.corpora import DataError
from tformer_jax.data.rows import ORDER
from tformer_jax.models import registry
from tformer_jax.models.losses import masked_cross_entropy, sum_over_chunks
from tformer_jax.nn.sharding import replicate
from tformer_jax.nn.xla import most_probable
from tformer_jax.parallel.placement import mesh_of, shard_batch, use_whole_mesh
from tformer_jax.special_tokens import IGNORED
from tformer_jax.tasks.evaluators.evaluation import Losses

Batch = Mapping[str, np.ndarray]
Batches = Callable[[], Iterable[Batch]]

MAX_PENDING_BATCHES = 4
"""Maximum number of batches dispatched to the device ahead of their results; bounds memory."""
MAX_PARTS = 4096
"""Maximum number of parts of a split whose losses are kept."""
CACHED_BYTES = 2**28
"""Maximum size of a split, in bytes, whose batches are cached for the next evaluation."""


class Measured(NamedTuple):
    """What `Likelihood` computes."""

    loss: float
    """Mean in nats per label."""
    accuracy: float
    """Percentage of labels predicted correctly."""
    losses: Losses
    sums: np.ndarray
    """float64 [rows, 3]: loss, number of correct predictions and number of labels of each row, in the order of the
    examples if batches have `ORDER`."""


class Likelihood:
    """Sums over all batches and divides once, so that batch size and padding do not change the result."""

    def __init__(
        self, model: nn.Module, batches: Batches, own: Sequence[int] | None = None, *, chunk: int | None = None
    ):
        """Evaluates `model` on `batches`.

        Args:
            batches: batches with all rows, or only with the rows of the batch shards `own` (`shard_batch`).
            chunk: maximum number of positions per row whose logits are in memory at once; None: all.
        """
        self._model, self._batches, self._own, self._chunk = model, batches, own, chunk
        self._cached: list[Batch] | None = None

    def __call__(self, params: Any) -> Measured:
        """Measures the model with the parameters `params`.

        Raises:
            DataError: there are no labels.
        """
        order: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        mesh = mesh_of(params)
        pending: collections.deque[jax.Array] = collections.deque()
        with use_whole_mesh(mesh):
            for batch in self._all_batches():
                order += [batch[ORDER]] if ORDER in batch else []
                arrays = {key: array for key, array in batch.items() if key != ORDER}
                pending.append(_sums(self._model, params, shard_batch(mesh, arrays, self._own), self._chunk))
                if len(pending) > MAX_PENDING_BATCHES:
                    rows.append(np.asarray(pending.popleft()))
            rows += map(np.asarray, pending)
        sums = np.concatenate([*rows, np.zeros((0, 3))]).astype(np.float64)
        loss, hits, count = sums.sum(axis=0).tolist()
        if not count:
            raise DataError("the split has no token to predict: evaluate more or longer texts")
        if order:
            sums = sums[np.argsort(np.concatenate(order))]
        return Measured(loss / count, 100 * hits / count, in_parts(sums[:, 0], sums[:, 2]), sums)

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


def in_parts(nll: np.ndarray, labels: np.ndarray) -> Losses:
    """Joins the rows that have labels to at most `MAX_PARTS` parts of successive rows; nll and labels are [rows]."""
    real = labels > 0
    starts = np.unique(np.linspace(0, real.sum(), min(real.sum(), MAX_PARTS), endpoint=False, dtype=np.int64))
    nll, labels = (np.add.reduceat(sums[real], starts) for sums in (nll, labels))
    return Losses(nll.tolist(), labels.astype(np.int64).tolist())


@functools.partial(jax.jit, static_argnames=("model", "chunk"))
def _sums(model: nn.Module, params: Any, batch: Mapping[str, jax.Array], chunk: int | None = None) -> jax.Array:
    """Returns the summed loss and the numbers of correct predictions and of labels of each row: float32 [B, 3]."""
    if chunk is None:
        logits, labels, _ = registry.forward(model, params, batch)
        return replicate(_sums_of_rows(logits, labels))

    def sums(x: jax.Array, labels: jax.Array) -> jax.Array:
        return _sums_of_rows(model.apply({"params": params}, x, method="logits"), labels)

    features, labels, _ = registry.forward(model, params, batch, method="features")
    return replicate(sum_over_chunks(sums, features, labels, chunk))


def _sums_of_rows(logits: Any, labels: jax.Array) -> jax.Array:
    sums = jax.vmap(masked_cross_entropy)(logits, labels)
    hits = (most_probable(logits) == labels) & (labels != IGNORED)
    return jnp.stack([sums.loss, hits.reshape(len(hits), -1).sum(axis=1), sums.labels], axis=1)
