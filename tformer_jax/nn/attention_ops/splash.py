"""JAX's splash attention for TPUs: a Pallas kernel that skips blocks outside of the causal mask or the window.

The G query heads of a key/value head read it without repetition. Block sizes are unmeasured.
"""

import functools
import math

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops import shards
from tformer_jax.nn.attention_ops.core import Backend, Operands
from tformer_jax.nn.attention_ops.reference import scaled, zero_masked_rows
from tformer_jax.nn.masks import Mask

LANES, BLOCK = 128, 512
"""Lengths are padded to a multiple of `LANES`, and split into blocks of at most `BLOCK`."""

PADDING = -1
"""Segment id of padding."""

SUPPORTED_CONDITIONS = frozenset({"causal", "window", "padding_mask", "segments", "cross"})
"""Supported `Mask.conditions`."""


def splash(x: Operands, *, interpret: bool = False) -> jax.Array:
    """Runs the kernel on the rows and heads of each device."""
    out = shards.on_each_device(functools.partial(_kernel, interpret=interpret), x)
    return zero_masked_rows(out, x.mask, x.k.shape[1])


def _kernel(x: Operands, *, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    T, S = x.q.shape[1], x.k.shape[1]
    padded_T, padded_S = (-(-length // LANES) * LANES for length in (T, S))
    rows, columns = math.gcd(padded_T, BLOCK), math.gcd(padded_S, BLOCK)
    shape = padded_T, padded_S
    kernel = library.make_splash_mha(
        library.MultiHeadMask([_static_mask(library, x.mask, shape)] * x.q.shape[2]),
        block_sizes=library.BlockSizes(
            block_q=rows,
            block_kv=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        ),
        attn_logits_soft_cap=x.scoring.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    q = _heads_first(scaled(x.q, x.scoring.scale), padded_T)
    k, v = (_heads_first(keys, padded_S) for keys in (x.k, x.v))
    out = jax.vmap(kernel)(q, k, v, _segments(library, x, *shape))
    return jnp.swapaxes(out, 1, 2)[:, :T]


def _static_mask(library, mask: Mask, shape: tuple[int, int]):
    """Returns the part of the mask that is known at compile time."""
    if mask.window is not None:
        return library.LocalMask(shape, (mask.window - 1, 0 if mask.causal else mask.window - 1), offset=0)
    return library.CausalMask(shape) if mask.causal else library.FullMask(shape)


def _segments(library, x: Operands, padded_T: int, padded_S: int):
    """Returns segment ids, int32 [B, T] and [B, S], that limit attention; None if the static mask suffices."""
    (B, T), S = x.q.shape[:2], x.k.shape[1]
    masked = x.mask.causal and T == S  # the causal mask hides the padded keys
    if not x.mask.conditions & {"padding_mask", "segments"} and (masked or S == padded_S):
        return None
    zeros = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32)
    queries, keys = zeros if x.mask.segments is None else x.mask.segments
    keys = keys if x.mask.padding_mask is None else jnp.where(x.mask.padding_mask, keys, PADDING)
    queries, keys = (
        jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, padded - ids.shape[1])), constant_values=PADDING)
        for ids, padded in ((queries, padded_T), (keys, padded_S))
    )
    return library.SegmentIds(queries, keys)


def _heads_first(x: jax.Array, length: int) -> jax.Array:
    """Pads and transposes [B, T, N, H] -> [B, N, length, H]."""
    return jnp.swapaxes(jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))), 1, 2)


SPLASH = Backend(splash, platforms=("tpu",), bias=False, dropout=False, conditions=SUPPORTED_CONDITIONS)
