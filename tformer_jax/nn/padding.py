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
        """Permutes [B, T]; returns None for None."""
        return x if x is None or self._order is None else jnp.take_along_axis(x, self._order, axis=1)

    def restore(self, x: jax.Array) -> jax.Array:
        """Applies the inverse permutation to [B, T, D]."""
        if self._order is None:
            return x
        return jnp.take_along_axis(x, jnp.argsort(self._order, axis=1)[..., None], axis=1)
