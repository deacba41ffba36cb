"""Cross-entropy loss for training and evaluation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax.models import registry
from tformer_jax.nn.linear import LOW_RANK
from tformer_jax.special_tokens import IGNORED

Tree = TypeVar("Tree")


class Sums(NamedTuple):
    """Float32 sums over the counted labels; divide them only once, by `labels` of the whole batch."""

    loss: jax.Array
    """Cross-entropy in nats, with label smoothing if it is used."""
    nll: jax.Array
    """Negative log-likelihood of the labels in nats, without smoothing."""
    z: jax.Array
    """`logsumexp(logits)^2` (PaLM, 2022, section 5)."""
    labels: jax.Array
    """int32: number of counted labels."""


def zero_sums() -> Sums:
    """Returns sums of zero."""
    zero = jnp.zeros(())
    return Sums(zero, zero, zero, jnp.zeros((), jnp.int32))


def masked_cross_entropy(
    logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0, smoothed: int | None = None
) -> Sums:
    """Computes the cross-entropy, summed over the counted labels.

    With smoothing e the target distribution is `(1 - e) * one_hot + e / V` ("Rethinking the Inception Architecture",
    2016, section 7). The distribution is never formed: `logsumexp - (1 - e) * logit[label] - e * mean(logits)`.

    Args:
        logits: float [..., V].
        labels: int [...]; negative labels (IGNORED, or PyTorch's -100) are not counted, and the loss of a label >= V is
            NaN.
        smoothed: number of tokens over which the mass e spreads, instead of V: a tokenizer may have fewer tokens than
            the model. The other rows count in `logsumexp`, as in published models.
    """
    logits = logits.astype(jnp.float32)
    counted = labels >= 0
    at_label = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    losses = normalizer - (1 - label_smoothing) * at_label
    if label_smoothing:
        losses = losses - label_smoothing * logits[..., :smoothed].mean(axis=-1)
    loss, nll, z = (jnp.where(counted, part, 0).sum() for part in (losses, normalizer - at_label, normalizer**2))
    return Sums(loss, nll, z, counted.sum(dtype=jnp.int32))


def batch_loss(
    model: nn.Module,
    params: Any,
    batch: registry.Batch,
    *,
    label_smoothing: float = 0.0,
    smoothed: int | None = None,
    chunk: int | None = None,
    dropout_key: jax.Array | None = None,
    low_rank: Any = None,
) -> tuple[Sums, jax.Array]:
    """Computes the training loss of a batch, and the sum of its auxiliary losses.

    Args:
        batch: as `registry.forward` takes it.
        smoothed: as in `masked_cross_entropy`.
        chunk: maximum number of positions per row whose logits are in memory at once, also in the backward pass; None:
            all. Results are equal up to the order of summation.
        dropout_key, low_rank: as `registry.forward` takes them.
    """
    forward = functools.partial(
        registry.forward, model, params, batch, train=True, dropout_key=dropout_key, low_rank=low_rank
    )
    if chunk is None:
        logits, labels, auxiliary_loss = forward()
        sums_of_all = masked_cross_entropy(logits, labels, label_smoothing=label_smoothing, smoothed=smoothed)
        return sums_of_all, auxiliary_loss
    features, labels, auxiliary_loss = forward(method="features")

    # the scan over chunks sums the gradients of the parameters in their dtype
    in_float32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)

    def sums(x: jax.Array, labels: jax.Array) -> Sums:
        logits: Any = model.apply({"params": in_float32, LOW_RANK: low_rank or {}}, x, method="logits")
        return masked_cross_entropy(logits, labels, label_smoothing=label_smoothing, smoothed=smoothed)

    return sum_over_chunks(sums, features, labels, chunk), auxiliary_loss


def sum_over_chunks(sums: Callable[[jax.Array, jax.Array], Tree], x: jax.Array, labels: jax.Array, chunk: int) -> Tree:
    """Sums `sums(x, labels)`, a tree, of x [B, T, D] and labels int [B, T] over chunks of at most `chunk` positions.

    Only x is kept for the backward pass, which recomputes each chunk.
    """
    B, T, D = x.shape
    pieces = -(-T // chunk)
    chunk = -(-T // pieces)  # equal pieces need the least padding
    missing = pieces * chunk - T
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0))).reshape(B, pieces, chunk, D).swapaxes(0, 1)
    labels = jnp.pad(labels, ((0, 0), (0, missing)), constant_values=IGNORED).reshape(B, pieces, chunk).swapaxes(0, 1)

    def add(total: Tree, piece: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, jax.checkpoint(sums)(*piece)), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(sums, x[0], labels[0]))
    return jax.lax.scan(add, zeros, (x, labels))[0]
