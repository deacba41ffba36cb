"""JAX's own Pallas kernels of FlashAttention, for TPU and GPU.

They know self-attention with causal masks, padding and packed segments (`RULES`). A query that is padding itself
gets an unspecified (finite) result.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops.core import Backend, Bias, Scoring
from tformer_jax.nn.masks import Mask

ROWS = 128
"""Lengths are padded to a multiple of this."""

NO_SEGMENT = -1

RULES = frozenset({"causal", "real", "segments"})
"""What `Mask` may say: one segment id a token tells keys from keys, so that queries must be the same tokens."""


def pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    bias: Bias | None,
    scoring: Scoring,
    dropout_key: None,
    *,
    kernel: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Runs the device's kernel on padded inputs, q and k of the same tokens."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    if kernel is None:
        kernel = tpu_kernel if jax.default_backend() == "tpu" else gpu_kernel
    k, v = jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2)
    widths = ((0, 0), (0, -T % ROWS), (0, 0), (0, 0))
    q, k, v = jnp.pad(q, widths), jnp.pad(k, widths), jnp.pad(v, widths)
    segments = jnp.pad(_segments(mask, q.shape[0], T), widths[:2], constant_values=NO_SEGMENT)
    return kernel(q, k, v, segments, causal=mask.causal, scale=scoring.scale)[:, :T]


def gpu_kernel(q, k, v, segments, *, causal: bool, scale: float, interpret: bool = False) -> jax.Array:
    """`jax.experimental.pallas.ops.gpu.attention`: [B, T, N, H], segments int [B, T] -> [B, T, N, H]."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    return mha(q, k, v, segments, sm_scale=scale, causal=causal, interpret=interpret)


def tpu_kernel(q, k, v, segments, *, causal: bool, scale: float) -> jax.Array:
    """`jax.experimental.pallas.ops.tpu.flash_attention`: [B, T, N, H], segments int [B, T] -> [B, T, N, H]."""
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

    q, k, v = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
    out = flash_attention(q, k, v, segment_ids=SegmentIds(segments, segments), causal=causal, sm_scale=scale)
    return jnp.swapaxes(out, 1, 2)


def _segments(mask: Mask, B: int, T: int) -> jax.Array:
    """One segment id a token, int32 [B, T]; padding is a segment of its own."""
    ids = jnp.zeros((B, T), jnp.int32) if mask.segments is None else mask.segments[1].astype(jnp.int32)
    return ids if mask.real is None else jnp.where(mask.real, ids, NO_SEGMENT)


PALLAS = Backend(pallas, platforms=("tpu", "gpu"), softcap=False, bias=False, dropout=False, rules=RULES)
