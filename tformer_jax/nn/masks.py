"""Attention masks: boolean arrays, True where a query may attend to a key.

Every mask broadcasts to [B, N, T, S]; `combine` intersects them.
"""

import jax
import jax.numpy as jnp


def padding(real: jax.Array) -> jax.Array:
    """Hides padded keys: [B, S] (True = real token) -> [B, 1, 1, S]."""
    return real[:, None, None, :]


def causal(length: int) -> jax.Array:
    """Lets position i attend to positions 0..i: [1, 1, T, T], lower triangle with its diagonal."""
    positions = jnp.arange(length)
    return (positions[None, :] <= positions[:, None])[None, None]


def hidden_suffix(length: int, hidden: int) -> jax.Array:
    """Entry (i, j) is hidden when `length - j + i <= hidden`: [1, 1, T, T].

    Position i + 1 sees one key more than position i, and the first one does not see the last `hidden` keys.
    `hidden = length - 1` is the causal mask; 0 hides nothing.
    """
    i, j = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    return (length - j + i > hidden)[None, None]


def cached(valid: jax.Array, index: jax.Array, length: int) -> jax.Array:
    """What `length` new tokens at slots `index`, `index + 1`, ... may attend to in a cache.

    Args:
        valid: bool [B, S], the slots that hold a real token, those of the new tokens included.
        index: int32 scalar, the slot of the first new token.

    Returns:
        bool [B, 1, T, S]: valid slots up to and including the query's own.
    """
    slots = jnp.arange(valid.shape[-1])
    before = slots[None, :] <= index + jnp.arange(length)[:, None]
    return valid[:, None, None, :] & before[None, None]


def combine(*masks: jax.Array | None) -> jax.Array | None:
    """Allows what every mask allows; None hides nothing."""
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    result = present[0]
    for mask in present[1:]:
        result = result & mask
    return result
