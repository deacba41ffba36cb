"""Attention as einsums that materialize the T x S weights."""

import dataclasses

import jax
import jax.numpy as jnp

from tformer_jax import axes
from tformer_jax.nn.attention_ops.core import Backend, Bias, Operands, Scoring
from tformer_jax.nn.dropout import dropout
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.sharding import mesh_axes
from tformer_jax.nn.xla import query_chunk

MASKED_SCORE = jnp.finfo(jnp.float32).min
"""Lower bound of the maximum score of a row; finite, so that a fully masked row gives no NaN."""


def scores(q: jax.Array, k: jax.Array, bias: jax.Array | None, scoring: Scoring) -> jax.Array:
    """Computes scores: q [B, T, N, H], k [B, S, K, H], bias [..., N, T, S] -> float32 [B, N, T, S].

    They are `softcap(scale * q k^T) + bias`.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    grouped = scaled(q, scoring.scale).reshape(B, T, K, N // K, H)
    result = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32)
    result = softcapped(result, scoring.softcap).reshape(B, N, T, S)
    return result if bias is None else result + bias


def softcapped(scores: jax.Array, cap: float | None) -> jax.Array:
    """Computes `cap * tanh(scores / cap)`; None: returns the scores."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def scaled(q: jax.Array, scale: float) -> jax.Array:
    """Computes `scale * q` in the dtype of q; of bfloat16, only the product is rounded, not the scale."""
    return (scale * q.astype(jnp.float32)).astype(q.dtype)


def weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Computes `weights v`: weights [B, N, T, S], v [B, S, K, H] -> float32 [B, N, T, H].

    This order of axes needs no transposed operand, which is several times faster on a CPU.
    """
    B, N, T, S = weights.shape
    K, H = v.shape[2:]
    grouped = weights.reshape(B, K, N // K, T, S)
    return jnp.einsum("BKGTS,BSKH->BKGTH", grouped, v, preferred_element_type=jnp.float32).reshape(B, N, T, H)


def reference(x: Operands) -> jax.Array:
    """Computes `softmax(scores) v` in chunks of `chunk_size` queries, each over its `Mask.key_range` only."""
    T, S = x.q.shape[1], x.k.shape[1]
    size = chunk_size(x.mask, T)
    chunks = []
    for number, t in enumerate(range(0, T, size)):
        queries = x.q[:, t : t + size]
        first, end = x.mask.key_range(t, queries.shape[1], S)
        key = None if x.dropout_key is None else jax.random.fold_in(x.dropout_key, number)
        part = dataclasses.replace(x, q=queries, k=x.k[:, first:end])
        weights, total = exponentials(part, t, first)
        dropped = dropout(weights, x.scoring.dropout_rate, key).astype(x.v.dtype)
        out = weighted_sum(dropped, x.v[:, first:end]) / jnp.where(total == 0, 1, total)
        chunks.append(jnp.swapaxes(out, 1, 2).astype(x.q.dtype))
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis=1)


def attention_weights(x: Operands) -> jax.Array:
    """Computes `softmax(scores)` without dropout: float32 [B, N, T, S].

    A query that may attend to no key has weights of 0; with sinks, weights sum to less than 1.
    """
    weights, total = exponentials(x, 0, 0)
    return weights / jnp.where(total == 0, 1, total)


def chunk_size(mask: Mask, T: int) -> int:
    """Returns the number of queries per chunk: `query_chunk`, if chunks can skip keys that the full call cannot."""
    size = T if mesh_axes(axes.LENGTH) else query_chunk(T)
    return size if size < T and mask.key_range(0, size, T) != (0, T) else T


def exponentials(x: Operands, t: int, s: int) -> tuple[jax.Array, jax.Array]:
    """Computes the numerators of the softmax, float32 [B, N, T, S], and their sums, [B, N, T, 1], with `exp(sink)`.

    The first query has the index t, the first key the index s. Without sinks, the sum is 0 for a query that may attend
    to no key.
    """
    T, S = x.q.shape[1], x.k.shape[1]
    added = None if x.bias is None else block_bias(x.bias, x.mask, t, T, s, S)
    logits = scores(x.q, x.k, added, x.scoring)
    may_attend = x.mask.block(t, T, s, S)
    if may_attend is not None:
        logits = jnp.where(may_attend, logits, -jnp.inf)
    peak = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True, initial=MASKED_SCORE))
    sinks = None if x.sinks is None else x.sinks[:, None, None]
    if sinks is not None:
        peak = jnp.maximum(peak, jax.lax.stop_gradient(sinks))
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return weights, total if sinks is None else total + jnp.exp(sinks - peak)


def block_bias(bias: Bias, mask: Mask, t: int, T: int, s: int, S: int) -> jax.Array:
    """Returns the bias between queries t, ..., t + T - 1 and keys s, ..., s + S - 1: float32 [B or 1, N, T, S]."""
    block = bias.block(*mask.block_positions(t, T, s, S))
    return block if block.ndim == 4 else block[None]


def zero_masked_rows(out: jax.Array, mask: Mask, S: int) -> jax.Array:
    """Zeroes the rows of out [B, T, N, H] whose queries may attend to none of the S keys."""
    attends = mask.attends_to_any(out.shape[1], S)
    return out if attends is None else jnp.where(attends[..., None], out, 0)


REFERENCE = Backend(reference, sinks=True)
