"""Dropout ("Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014)."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a share `rate` of x and scales the rest by 1 / (1 - rate); identity without a key or at rate 0."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0)


class Dropout(nn.Module):
    """`dropout` with a key from the "dropout" stream; identity outside training."""

    rate: float

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Any shape, unchanged."""
        return dropout(x, self.rate, self.make_rng("dropout")) if train and self.rate else x
