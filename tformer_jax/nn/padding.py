"""Rows whose padding stands anywhere, in the order that a full pass assumes: real tokens first.

A full pass counts positions, windows and biases from the start of a row. Sorted rows make it count real tokens only, as
a cache does, for every kind of position and every attention backend.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

MaybeArray = TypeVar("MaybeArray", jax.Array, jax.Array | None)


class RealFirst:
    """The stable order of each row in which its real tokens come first."""

    def __init__(self, real: jax.Array | None, *, right_padded: bool = False):
        """Real tokens are bool [B, T]; where all are, or the row is `right_padded`, nothing moves."""
        self._order = None if real is None or right_padded else jnp.argsort(~real, axis=1, stable=True)

    def sort(self, x: MaybeArray) -> MaybeArray:
        """[B, T] in this order; None stays None."""
        return x if x is None or self._order is None else jnp.take_along_axis(x, self._order, axis=1)

    def restore(self, x: jax.Array) -> jax.Array:
        """[B, T, D] from this order into the row's own."""
        if self._order is None:
            return x
        return jnp.take_along_axis(x, jnp.argsort(self._order, axis=1)[..., None], axis=1)
