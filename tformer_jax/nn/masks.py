"""Attention masks: which keys a query may attend to."""

import dataclasses
import functools
import operator

import flax
import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.base.errors import UserError


@flax.struct.dataclass
class Mask:
    """Conditions under which a query may attend to a key: all that are set must hold.

    They are stored rather than an array, so that a backend can evaluate the mask in full or in blocks.
    """

    padding_mask: jax.Array | None = None
    """bool [B, S]: True for keys that are not padding."""
    segments: tuple[jax.Array, jax.Array] | None = None
    """int [B, T] and [B, S]: segment ids of queries and keys; a query may attend to its own segment."""
    prefix: jax.Array | None = None
    """int32 [B]: number of leading keys that all queries of a causal row may attend to."""
    explicit: jax.Array | None = None
    """bool with four axes, broadcastable to [B, N, T, S]."""
    positions: tuple[jax.Array, jax.Array] | None = None
    """int32 [B or 1, T] and [B or 1, S]: positions of queries and keys, -1 for empty slots; None: 0, 1, ...."""
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    """A query may attend to its own position and earlier ones."""
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    """A query may attend to positions less than `window` away."""
    self_attention: bool = flax.struct.field(pytree_node=False, default=False)
    """Queries and keys are the same tokens: T = S, and `padding_mask` and `segments` describe both."""
    padding_last: bool = flax.struct.field(pytree_node=False, default=False)
    """Padding is only at the end of each row."""

    @property
    def conditions(self) -> frozenset[str]:
        """Names of the conditions that are set, and "cross" unless `self_attention` is set."""
        optional = ("padding_mask", "segments", "prefix", "explicit", "positions", "window")
        names = {name for name in optional if getattr(self, name) is not None}
        return frozenset(names | ({"causal"} if self.causal else set()) | (set() if self.self_attention else {"cross"}))

    @property
    def without_hidden_padding(self) -> "Mask":
        """The mask without `padding_mask` if queries that are not padding attend to the same keys without it."""
        hidden = self.causal and self.self_attention and self.padding_last and self.prefix is None
        return dataclasses.replace(self, padding_mask=None) if hidden and self.positions is None else self

    def block_positions(self, t: jax.Array | int, T: int, s: jax.Array | int, S: int) -> tuple[jax.Array, jax.Array]:
        """Returns the positions of queries t, ..., t + T - 1 and keys s, ..., s + S - 1.

        They are int32 [T] and [S], or [B or 1, T] and [B or 1, S] if `positions` is set.
        """
        if self.positions is None:
            return t + jnp.arange(T), s + jnp.arange(S)
        queries, keys = self.positions
        return _part(queries, t, T, 1), _part(keys, s, S, 1)

    def dense(self, T: int, S: int) -> jax.Array | None:
        """Returns the mask as an array: bool, broadcastable to [B, N, T, S]; None if nothing is masked."""
        return self.block(0, T, 0, S)

    def block(self, t: jax.Array | int, T: int, s: jax.Array | int, S: int) -> jax.Array | None:
        """Returns the mask of queries t, ..., t + T - 1 and keys s, ..., s + S - 1, in the form of `dense`."""
        conditions = self._by_distance(t, T, s, S)
        if self.padding_mask is not None:
            conditions.append(_part(self.padding_mask, s, S, 1)[:, None, None, :])
        if self.segments is not None:
            queries, keys = _part(self.segments[0], t, T, 1), _part(self.segments[1], s, S, 1)
            conditions.append((queries[:, :, None] == keys[:, None, :])[:, None])
        if self.explicit is not None:
            conditions.append(_part(_part(self.explicit, t, T, 2), s, S, 3))
        return functools.reduce(operator.and_, conditions) if conditions else None

    def attends_to_any(self, T: int, S: int) -> jax.Array | None:
        """Returns which queries may attend to at least one key: bool, broadcastable to [B, T, N]; None: all."""
        conditions = self.conditions
        attends_to_itself = self.self_attention and conditions <= {"causal", "prefix", "window", "segments"}
        attends_to_first_key = conditions <= {"causal", "prefix", "cross"}
        if attends_to_itself or attends_to_first_key:
            return None
        if self.padding_mask is not None and conditions <= {"padding_mask", "causal", "cross"}:
            attends = self.padding_mask.any(axis=1)[:, None]
            if self.causal:
                attends = attends & (jnp.arange(T) >= self.padding_mask.argmax(axis=1)[:, None])
            return attends[..., None]
        may_attend = self.dense(T, S)
        return None if may_attend is None else jnp.swapaxes(may_attend.any(axis=-1), 1, 2)

    def key_range(self, t: int, T: int, S: int) -> tuple[int, int]:
        """Returns (start, stop) of the keys that `causal` and `window` leave visible to queries t, ..., t + T - 1."""
        first, end = 0, S
        if self.positions is None and self.prefix is None and self.causal:
            end = min(t + T, S)
        if self.positions is None and self.window is not None:
            first, end = max(t - self.window + 1, 0), min(t + T + self.window - 1, end)
        return min(first, S), end

    def visible_blocks(self, T: int, S: int, rows: int, columns: int) -> jax.Array:
        """Returns which blocks of queries and keys are not fully masked, without evaluating them.

        Ignores `explicit`, so that some fully masked blocks are not detected.

        Args:
            T, S: multiples of `rows` and `columns`.

        Returns:
            bool [T / rows, S / columns].
        """
        queries, keys = self.block_positions(0, T, 0, S)
        (first_query, last_query), (first_key, last_key) = _extremes(queries, rows), _extremes(keys, columns)
        after, before = first_key - last_query[:, None], first_query[:, None] - last_key
        masked = jnp.broadcast_to(False if self.positions is None else last_key < 0, after.shape)
        if self.causal:
            beyond_prefix = True if self.prefix is None else first_key >= self.prefix.max()
            masked |= (after > 0) & beyond_prefix
        if self.window is not None:
            masked |= (before >= self.window) | (after >= self.window)
        if self.padding_mask is not None:
            masked |= ~_blocks(self.padding_mask, columns).any(axis=(0, 2))
        if self.segments is not None:
            mine, others = _blocks(self.segments[0], rows), _blocks(self.segments[1], columns)
            below = mine.max(axis=2)[:, :, None] < others.min(axis=2)[:, None]
            above = mine.min(axis=2)[:, :, None] > others.max(axis=2)[:, None]
            masked |= (below | above).all(axis=0)
        return ~masked

    def _by_distance(self, t, T, s, S) -> list[jax.Array]:
        """Evaluates `positions`, `causal` with `prefix`, and `window`, if they are set: bool [B or 1, 1, T or 1, S]."""
        queries, keys = map(jnp.atleast_2d, self.block_positions(t, T, s, S))
        queries, keys = queries[:, None, :, None], keys[:, None, None, :]
        conditions = [] if self.positions is None else [keys >= 0]
        if self.causal:
            visible = keys <= queries
            conditions.append(visible if self.prefix is None else visible | (keys < self.prefix[:, None, None, None]))
        if self.window is not None:
            conditions.append(abs(queries - keys) < self.window)
        return conditions


def as_mask(mask: jax.Array | Mask | None) -> Mask:
    """Converts a boolean array broadcastable to [B, N, T, S], or None (no masking), to a `Mask`.

    Raises:
        UserError: the array is not boolean (such as an additive mask) or does not have four axes.
    """
    if isinstance(mask, Mask):
        return mask
    if mask is not None and (mask.dtype != bool or mask.ndim != 4):
        raise UserError(
            f"an attention mask is a bool array [B, N, T, S] in which True means may attend, not {mask.dtype} of shape "
            f"{mask.shape}; write `mask == 0` for an additive mask, and insert axes of size 1 to broadcast it"
        )
    return Mask(explicit=mask)


def check_padding_mask(name: str, padding_mask: jax.Array | None, tokens: tuple[int, ...]) -> None:
    """Raises `UserError` unless a padding mask, called `name`, is None or bool of the shape `tokens`, (B, T)."""
    if padding_mask is None:
        return
    dtype, shape = getattr(padding_mask, "dtype", None), getattr(padding_mask, "shape", None)
    if dtype is None or dtype != np.bool_:
        raise UserError(f"{name} has the dtype {dtype}: pass booleans, True for tokens that are not padding")
    if shape != tokens:
        raise UserError(f"{name} has the shape {shape}, but its tokens have {tokens}")


def check_explicit(mask: Mask, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    """Raises `UserError` unless a mask is broadcastable to queries [B, T, N, H] and keys [B, S, ...] of one batch."""
    (B, T, N, _), S = q, k[1]
    if B != k[0]:
        raise UserError(f"queries have {B} rows, but keys have {k[0]}: pass batches of equal size")
    if mask.explicit is None:
        return
    shape = mask.explicit.shape
    if any(size not in (1, full) for size, full in zip(shape, (B, N, T, S), strict=True)):
        raise UserError(f"an attention mask has the shape {shape}, which is not broadcastable to {(B, N, T, S)}")


def lookahead_mask(length: int, lookahead: int) -> jax.Array:
    """Returns a mask in which query i may attend to keys up to `i + lookahead`: bool [1, 1, T, T].

    A lookahead of 0 is the causal mask, one of `length - 1` masks nothing. The mask that hides the last m keys from
    query 0, and one key fewer from each later query, has a lookahead of `length - 1 - m`.
    """
    i, j = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    return (j - i <= lookahead)[None, None]


def _part(array: jax.Array, start: jax.Array | int, size: int, axis: int) -> jax.Array:
    """Slices one axis; returns the array unchanged if the axis has size 1 or the slice is the full axis."""
    if array.shape[axis] == 1 or (isinstance(start, int) and start == 0 and array.shape[axis] == size):
        return array
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis)


def _blocks(array: jax.Array, size: int) -> jax.Array:
    """Splits the last axis into blocks: [L] or [B, L] -> [B or 1, L / size, size]."""
    array = jnp.atleast_2d(array)
    return array.reshape(len(array), -1, size)


def _extremes(positions: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the minimum and maximum of each block of positions [L] or [B, L] over all rows: [L / size] each."""
    blocks = _blocks(positions, size)
    return blocks.min(axis=(0, 2)), blocks.max(axis=(0, 2))
