"""Scaled dot-product attention as pure functions.

Backends share one signature and one meaning; `BACKENDS` names them. A query with nothing to attend to gives zeros,
in the result and in every gradient.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tformer_jax.config import ConfigError
from tformer_jax.nn.dropout import dropout


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    backend: str = "reference",
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`softmax(scale * q k^T) v` ("Attention Is All You Need", 2017), with G = N / K queries to a key/value head.

    Args:
        q: [B, T, N, H].
        k, v: [B, S, K, H]; query head n reads key/value head n // G.
        mask: bool with four axes, broadcastable to [B, N, T, S]; True = may attend. None hides nothing.
        scale: factor of the logits; None: 1 / sqrt(H).
        backend: a name in `BACKENDS`.
        dropout_rate: share of the weights set to zero, when `dropout_key` is given.

    Returns:
        [B, T, N, H] in the dtype of q; logits and softmax are float32.

    Raises:
        ConfigError: the backend is unknown, or cannot drop weights.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"attention backend {backend!r} is not here; write one of {', '.join(BACKENDS)}")
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    if dropout_key is None:
        dropout_rate = 0.0
    return BACKENDS[backend](q, k, v, mask, scale, dropout_rate, dropout_key)


def reference(q, k, v, mask, scale, dropout_rate, dropout_key) -> jax.Array:
    """The formula, written out with einsum."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    logits = scale * jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32)
    if mask is not None:
        logits = jnp.where(_group_heads(mask, K), logits, jnp.finfo(jnp.float32).min)
    weights = dropout(jax.nn.softmax(logits, axis=-1), dropout_rate, dropout_key).astype(v.dtype)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(B, T, N, H)
    return out if mask is None else _zero_hidden_rows(out, mask)


def xla(q, k, v, mask, scale, dropout_rate, dropout_key) -> jax.Array:
    """`jax.nn.dot_product_attention` in its portable implementation."""
    if dropout_rate:
        raise ConfigError("model.attention_backend='xla' cannot drop attention weights; write 'reference'")
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="xla")
    return out if mask is None else _zero_hidden_rows(out, mask)


BACKENDS: dict[str, Callable[..., jax.Array]] = {"reference": reference, "xla": xla}


def basic_self_attention(x: jax.Array) -> jax.Array:
    """Self-attention without parameters, `softmax(x x^T) x`: [..., T, D] -> [..., T, D]."""
    logits = jnp.einsum("...TD,...SD->...TS", x, x, preferred_element_type=jnp.float32)
    return jnp.einsum("...TS,...SD->...TD", jax.nn.softmax(logits, axis=-1).astype(x.dtype), x)


def _group_heads(mask: jax.Array, K: int) -> jax.Array:
    """[B, N or 1, T, S] -> [B, K or 1, G or 1, T, S]."""
    B, N, T, S = mask.shape
    return mask[:, :, None] if N == 1 else mask.reshape(B, K, N // K, T, S)


def _zero_hidden_rows(out: jax.Array, mask: jax.Array) -> jax.Array:
    """Zeroes the rows of out [B, T, N, H] whose queries may attend to nothing."""
    sees_something = jnp.swapaxes(mask.any(axis=-1), 1, 2)  # [B, T, N or 1]
    return jnp.where(sees_something[..., None], out, 0)
