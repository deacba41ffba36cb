"""Moves padding to the end of each row, so that positions count only real tokens, as in a cache."""

from typing import TypeVar

import jax
import jax.numpy as jnp

MaybeArray = TypeVar("MaybeArray", jax.Array, jax.Array | None)


class PaddingLast:
    """Stable permutation of each row that moves padding to its end."""

    def __init__(self, padding_mask: jax.Array | None, *, right_padded: bool = False):
        """Computes the permutation from a mask, bool [B, T], of tokens that are not padding.

        Nothing is reordered if the mask is None (no padding) or `right_padded`.
        """
        self._order = None if padding_mask is None or right_padded else jnp.argsort(~padding_mask, axis=1, stable=True)

    def sort(self, x: MaybeArray) -> MaybeArray:
        """Permutes [B, T, ...] along T; returns None for None."""
        return x if x is None or self._order is None else take_per_row(x, self._order)

    def restore(self, x: jax.Array) -> jax.Array:
        """Applies the inverse permutation to [B, T, ...]."""
        return x if self._order is None else take_per_row(x, jnp.argsort(self._order, axis=1))


def take_per_row(x: jax.Array, order: jax.Array) -> jax.Array:
    """Gathers x [B, T, ...] along T by indices of each row, int [B, L] -> [B, L, ...]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)
