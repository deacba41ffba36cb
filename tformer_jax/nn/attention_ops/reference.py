"""The formula, written out with einsum; it holds all T x S weights."""

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops.core import Backend, Bias, Scoring
from tformer_jax.nn.dropout import dropout
from tformer_jax.nn.masks import Mask

HIDDEN = jnp.finfo(jnp.float32).min
"""The score of a hidden key: finite, so that a row of nothing else is no NaN."""


def scores(q: jax.Array, k: jax.Array, bias: jax.Array | None, scoring: Scoring) -> jax.Array:
    """`softcap(scale * q k^T) + bias`: q [B, T, N, H], k [B, S, K, H], bias [..., N, T, S] -> float32 [B, N, T, S]."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    grouped = q.reshape(B, T, K, N // K, H)
    result = scoring.scale * jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32)
    if scoring.softcap is not None:
        result = scoring.softcap * jnp.tanh(result / scoring.softcap)
    result = result.reshape(B, N, T, S)
    return result if bias is None else result + bias


def weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """weights [B, N, T, S], v [B, S, K, H] -> [B, T, N, H].

    The product comes in the order that needs no transposed operand, which is several times faster on a CPU.
    """
    B, N, T, S = weights.shape
    K, H = v.shape[2:]
    out = jnp.einsum("BKGTS,BSKH->BKGTH", weights.reshape(B, K, N // K, T, S), v)
    return jnp.swapaxes(out.reshape(B, N, T, H), 1, 2)


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    bias: Bias | None,
    scoring: Scoring,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """`softmax(scores) v`."""
    T, S = q.shape[1], k.shape[1]
    may_attend = mask.dense(T, S)
    logits = scores(q, k, dense_bias(bias, mask, T, S), scoring)
    if may_attend is not None:
        logits = jnp.where(may_attend, logits, HIDDEN)
    weights = dropout(jax.nn.softmax(logits, axis=-1), scoring.dropout_rate, dropout_key)
    return zero_hidden_rows(weighted_sum(weights.astype(v.dtype), v), mask, S)


def dense_bias(bias: Bias | None, mask: Mask, T: int, S: int) -> jax.Array | None:
    """The whole bias, float32 [B or 1, N, T, S]."""
    if bias is None:
        return None
    whole = bias.block(*mask.places(0, T, 0, S))
    return whole if whole.ndim == 4 else whole[None]


def zero_hidden_rows(out: jax.Array, mask: Mask, S: int) -> jax.Array:
    """Zeroes the rows of out [B, T, N, H] whose queries may attend to none of S keys."""
    sees_something = mask.sees_something(out.shape[1], S)
    return out if sees_something is None else jnp.where(sees_something[..., None], out, 0)


REFERENCE = Backend(reference)
