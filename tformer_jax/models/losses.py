"""Losses of training and evaluation: cross-entropy, distillation and guided alignment, optionally in chunks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.config.decode import AlignmentHead
from tformer_jax.data.columns import TAUGHT_IDS, TAUGHT_LOG_P
from tformer_jax.models import registry
from tformer_jax.nn.attention_ops import attention_weights
from tformer_jax.nn.linear import LOW_RANK
from tformer_jax.nn.module import WATCHED
from tformer_jax.nn.quantized import is_quantized
from tformer_jax.special_tokens import IGNORED

Tree = TypeVar("Tree")
LEAST_WEIGHT = 1e-9
"""Attention weight below which guided alignment has no gradient."""


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
    divergence: jax.Array
    """`divergence` from a teacher; 0 without one."""


def zero_sums() -> Sums:
    """Returns sums of zero."""
    zero = jnp.zeros(())
    return Sums(zero, zero, zero, jnp.zeros((), jnp.int32), zero)


class Teacher(NamedTuple):
    """A model whose distributions another one learns, beside the labels."""

    model: nn.Module | None
    """None: batches have the distributions, as `TopLogits`."""
    params: Any
    weight: float
    """The loss is `(1 - weight) * cross-entropy + weight * divergence`."""
    temperature: float


class TopLogits(NamedTuple):
    """The k largest logits of a teacher, up to a constant: int32 ids and float32 logits [..., k]."""

    ids: jax.Array
    logits: jax.Array


class Guide(NamedTuple):
    """Links between words that a cross-attention learns, beside the labels."""

    head: AlignmentHead
    weight: jax.Array
    """Factor of the loss, a sum over the linked tokens."""


def guided_loss(collected: Any, cfg: ModelConfig, batch: registry.Batch, guide: Guide) -> jax.Array:
    """Computes the cross-entropy between links and attention weights, summed over the linked tokens, in nats.

    Args:
        collected: dictionary of all collections; "watch" has the operands of cross-attention.
        batch: `aligned` is int32 [B, T], the place of a token of the source for each label; IGNORED: none.
    """
    layer = cfg.decoder_layers - 1 if guide.head.layer is None else guide.head.layer
    from tformer_jax.models.conversions import convert_layers

    decoder = convert_layers(collected[WATCHED], cfg, scan_layers=False)["decoder"]
    stored = decoder[f"layers_{layer}"]["cross_attention"]
    if "operands" not in stored:
        raise UserError(f"train.guided_alignment: model.attention={cfg.attention!r} does not store its operands")
    weights = attention_weights(stored["operands"][0])
    weights = weights.mean(axis=1) if guide.head.head is None else weights[:, guide.head.head]
    places = batch["aligned"]
    if guide.head.query == "reads":
        places = jnp.pad(places[:, :-1], ((0, 0), (1, 0)), constant_values=IGNORED)
    chosen = jnp.take_along_axis(weights, jnp.maximum(places, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(places >= 0, jnp.log(jnp.maximum(chosen, LEAST_WEIGHT)), 0).sum()


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
    return Sums(loss, nll, z, counted.sum(dtype=jnp.int32), jnp.zeros(()))


def divergence(logits: jax.Array, teacher: jax.Array | TopLogits, temperature: float) -> jax.Array:
    """Computes `T^2 KL(p || q)` with `p = softmax(teacher / T)` and `q = softmax(logits / T)`: [..., V] -> [...].

    T^2 keeps the size of the gradients ("Distilling the Knowledge in a Neural Network", 2015, section 2). Of
    `TopLogits`, p is the softmax over the k tokens: the probability of all others is 0.
    """
    theirs = teacher.logits if isinstance(teacher, TopLogits) else teacher
    p, q = (jax.nn.log_softmax(side.astype(jnp.float32) / temperature, axis=-1) for side in (theirs, logits))
    if isinstance(teacher, TopLogits):
        q = jnp.take_along_axis(q, teacher.ids, axis=-1)
    return temperature**2 * (jnp.exp(p) * (p - q)).sum(axis=-1)


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
    teacher: Teacher | None = None,
    guide: Guide | None = None,
) -> tuple[Sums, jax.Array]:
    """Computes the training loss of a batch, and the sum of its auxiliary losses.

    Args:
        batch: as `registry.forward` takes it.
        smoothed: as in `masked_cross_entropy`.
        chunk: maximum number of positions per row whose logits are in memory at once, also in the backward pass; None:
            all. Results are equal up to the order of summation.
        dropout_key, low_rank: as `registry.forward` takes them.
        teacher: a model with the same arguments and vocabulary, which is run without dropout. Without a model, its
            distributions are in the batch.
        guide: the cross-attention that learns links, which are an auxiliary loss.
    """
    method = "__call__" if chunk is None else "features"
    options: Any = {"train": True, "dropout_key": dropout_key, "low_rank": low_rank, "method": method}
    watched = () if guide is None else (WATCHED,)
    (values, labels, auxiliary_loss), collected = registry.watched_forward(model, params, batch, watched, **options)
    if guide is not None:
        auxiliary_loss += guide.weight * guided_loss(collected, model.cfg, batch, guide)
    taught = _teacher_values(teacher, batch, method)
    sums = functools.partial(_taught_sums, label_smoothing=label_smoothing, smoothed=smoothed, teacher=teacher)
    if chunk is None:
        return sums(values, labels, taught), auxiliary_loss

    # the scan over chunks sums the gradients of the parameters in their dtype
    in_float32 = jax.tree.map(
        lambda leaf: leaf if is_quantized(leaf) else leaf.astype(jnp.float32), params, is_leaf=is_quantized
    )

    def sums_of_chunk(features: tuple[jax.Array, Any], labels: jax.Array) -> Sums:
        own, taught = features
        logits: Any = model.apply({"params": in_float32, LOW_RANK: low_rank or {}}, own, method="logits")
        if teacher is not None and teacher.model is not None:
            taught = teacher.model.apply({"params": teacher.params}, taught, method="logits")
        return sums(logits, labels, taught)

    return sum_over_chunks(sums_of_chunk, (values, taught), labels, chunk), auxiliary_loss


def _teacher_values(teacher: Teacher | None, batch: registry.Batch, method: str) -> Any:
    """Returns what a teacher gives for a batch: its logits, or the features that `logits` takes; None without one."""
    if teacher is None:
        return None
    if teacher.model is None:
        return TopLogits(batch[TAUGHT_IDS], batch[TAUGHT_LOG_P])
    return registry.forward(teacher.model, teacher.params, batch, method=method).values


def _taught_sums(
    logits: jax.Array,
    labels: jax.Array,
    taught: Any,
    *,
    label_smoothing: float,
    smoothed: int | None,
    teacher: Teacher | None,
) -> Sums:
    """Computes the cross-entropy, with a teacher averaged with the divergence from its logits `taught`."""
    own = masked_cross_entropy(logits, labels, label_smoothing=label_smoothing, smoothed=smoothed)
    if teacher is None:
        return own
    distance = jnp.where(labels >= 0, divergence(logits, taught, teacher.temperature), 0).sum()
    loss = (1 - teacher.weight) * own.loss + teacher.weight * distance
    return own._replace(loss=loss, divergence=distance)


def sum_over_chunks(sums: Callable[[Any, jax.Array], Tree], x: Any, labels: jax.Array, chunk: int) -> Tree:
    """Sums `sums(x, labels)`, a tree, over chunks of at most `chunk` positions that have labels.

    Only x is kept for the backward pass, which recomputes each chunk. Positions without a label are moved to the end of
    their row, and chunks without labels are skipped.

    Args:
        sums: does not depend on the order of positions; zero where no position has a label.
        x: array [B, T, D], or a tree of such arrays.
        labels: int [B, T]; negative for positions without a label.
    """
    B, T = labels.shape
    order = jnp.argsort(labels < 0, axis=1, stable=True)
    pieces = -(-T // chunk)
    chunk = -(-T // pieces)  # equal pieces need the least padding
    missing = pieces * chunk - T

    def split(array: jax.Array, filler: int = 0) -> jax.Array:
        ordered = jnp.take_along_axis(array, order.reshape(B, T, *[1] * (array.ndim - 2)), axis=1)
        padded = jnp.pad(ordered, ((0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)), constant_values=filler)
        return padded.reshape(B, pieces, chunk, *array.shape[2:]).swapaxes(0, 1)

    x, labels = jax.tree.map(split, x), split(labels, IGNORED)

    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(sums, *jax.tree.map(lambda array: array[0], (x, labels))),
    )

    @jax.checkpoint
    def sums_of_piece(x: Any, labels: jax.Array) -> Tree:
        return jax.lax.cond((labels >= 0).any(), sums, lambda *_: zeros, x, labels)

    def add(total: Tree, piece: tuple[Any, jax.Array]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, sums_of_piece(*piece)), None

    return jax.lax.scan(add, zeros, (x, labels))[0]
