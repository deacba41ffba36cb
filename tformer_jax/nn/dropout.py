"""Dropout ("Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014)."""

import jax
import jax.numpy as jnp

from tformer_jax.nn.module import Module

STEPS = 2**16
"""Rates are rounded to multiples of 1 / STEPS, so that one 32-bit random number serves two elements."""


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a fraction `rate` of x and scales the rest by 1 / (1 - rate); identity without a key or at rate 0.

    `rate` must be less than 1. Random numbers are most of the cost, so each 32-bit number is used for two elements.
    """
    dropped = min(round(rate * STEPS), STEPS - 1)
    if key is None or dropped == 0:
        return x
    keep = _random_bits(key, x.shape) >= dropped
    scaled = x.astype(jnp.float32) * (STEPS / (STEPS - dropped))
    return jnp.where(keep, scaled.astype(x.dtype), 0)


def _random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws uint16 of `shape`; neighbors on the last axis are the halves of one 32-bit number."""
    *lead, size = shape or (1,)
    words = jax.random.bits(key, (*lead, -(-size // 2)), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*lead, -1)
    return halves[..., :size].reshape(shape)


class Dropout(Module):
    """`dropout` with a key from the "dropout" stream; identity outside training."""

    rate: float
    whole_vectors: bool = False

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Applies dropout to an array of any shape: to its elements, or to whole vectors of the last axis."""
        if not (train and self.rate):
            return x
        if self.whole_vectors:
            return x * dropout(jnp.ones((*x.shape[:-1], 1), x.dtype), self.rate, self.dropout_key())
        return dropout(x, self.rate, self.dropout_key())
