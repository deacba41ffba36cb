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
    backend: str = "reference",
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`softmax(q k^T / sqrt(H)) v` ("Attention Is All You Need", 2017), with G = N / K queries to a key/value head.

    Args:
        q: [B, T, N, H].
        k, v: [B, S, K, H]; query head n reads key/value head n // G.
        mask: bool, broadcastable to [B, N, T, S]; True = may attend.
        backend: a name in `BACKENDS`.
        dropout_rate: share of the weights set to zero, when `dropout_key` is given.

    Returns:
        [B, T, N, H] in the dtype of q; logits and softmax are float32.

    Raises:
        ConfigError: the backend is unknown, or cannot drop weights.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"attention backend {backend!r} is not here; write one of {', '.join(BACKENDS)}")
    if dropout_key is None:
        dropout_rate = 0.0
    return BACKENDS[backend](q, k, v, mask, dropout_rate, dropout_key)


def reference(q, k, v, mask, dropout_rate, dropout_key) -> jax.Array:
    """The formula, written out with einsum."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    grouped = q.reshape(B, T, K, G, H)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(H)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:1], mask.shape[1], T, S))
        logits = jnp.where(_group_heads(mask, K, G), logits, jnp.finfo(jnp.float32).min)
    weights = dropout(jax.nn.softmax(logits, axis=-1), dropout_rate, dropout_key).astype(v.dtype)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(B, T, N, H)
    return out if mask is None else _zero_hidden_rows(out, mask)


def xla(q, k, v, mask, dropout_rate, dropout_key) -> jax.Array:
    """`jax.nn.dot_product_attention` in its portable implementation."""
    if dropout_rate:
        raise ConfigError("model.attention_backend='xla' cannot drop attention weights; write 'reference'")
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")
    return out if mask is None else _zero_hidden_rows(out, mask)


BACKENDS: dict[str, Callable[..., jax.Array]] = {"reference": reference, "xla": xla}


def basic_self_attention(x: jax.Array) -> jax.Array:
    """Self-attention without parameters, `softmax(x x^T) x`: [..., T, D] -> [..., T, D]."""
    logits = jnp.einsum("...TD,...SD->...TS", x, x, preferred_element_type=jnp.float32)
    return jnp.einsum("...TS,...SD->...TD", jax.nn.softmax(logits, axis=-1).astype(x.dtype), x)


def _group_heads(mask: jax.Array, K: int, G: int) -> jax.Array:
    """[B, N or 1, T, S] -> [B, K or 1, G or 1, T, S]."""
    if mask.shape[1] == 1:
        return mask[:, :, None]
    return mask.reshape(mask.shape[0], K, G, *mask.shape[2:])


def _zero_hidden_rows(out: jax.Array, mask: jax.Array) -> jax.Array:
    """Zeroes the rows of out [B, T, N, H] whose queries may attend to nothing."""
    sees_something = mask.any(axis=-1)  # [B, N or 1, T]
    return jnp.where(jnp.swapaxes(sees_something, 1, 2)[..., None], out, 0)
