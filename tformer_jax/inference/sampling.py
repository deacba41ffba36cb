"""How the next token is chosen from logits, as pure functions."""

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.special_tokens import BOS, PAD

NEVER_GENERATED = (PAD, BOS)
"""They mark structure around a text; no text contains them."""


def choose(logits: jax.Array, cfg: DecodeConfig, keys: jax.Array) -> jax.Array:
    """The next token of each row, as `cfg.strategy` says; never PAD or BOS.

    Args:
        logits: float32 [B, V].
        keys: [B] PRNG keys, one a row, so that a row's choice depends on no other row; greedy choice ignores them.

    Returns:
        int32 [B].
    """
    logits = forbid(logits)
    if cfg.strategy == "greedy":
        return most_probable(logits)
    return jax.vmap(jax.random.categorical)(keys, restrict(logits, cfg)).astype(jnp.int32)


def forbid(logits: jax.Array) -> jax.Array:
    """Excludes (-inf) what is never generated: [..., V] -> [..., V]."""
    return jnp.where(jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(NEVER_GENERATED)), -jnp.inf, logits)


def most_probable(logits: jax.Array) -> jax.Array:
    """The index of the largest logit, the first one of equals: [..., V] -> int32 [...].

    `argmax` by `top_k`, which XLA vectorises on CPU.
    """
    return jax.lax.top_k(logits, 1)[1][..., 0]


def top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis, largest first, and their places; k may exceed the axis."""
    return jax.lax.top_k(values, min(k, values.shape[-1]))


def restrict(logits: jax.Array, cfg: DecodeConfig) -> jax.Array:
    """Logits of the distribution that is sampled from: temperature first, then top-k, then top-p; [B, V] -> [B, V]."""
    logits = logits / cfg.temperature
    if cfg.top_k is not None:
        logits = keep_top_k(logits, cfg.top_k)
    if cfg.top_p is not None:
        logits = keep_top_p(logits, cfg.top_p)
    return logits


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Excludes (-inf) every token less probable than the k-th: [B, V] -> [B, V]."""
    lowest = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits < lowest, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Keeps the most probable tokens up to and including the one that brings their mass to p: [B, V] -> [B, V].

    "The Curious Case of Neural Text Degeneration" (2020). The most probable token always stays.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (mass_before < p).at[:, 0].set(True)
    lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < lowest, -jnp.inf, logits)
