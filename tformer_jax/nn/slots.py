"""Slot layouts of a KV cache: which slots a call writes, and which it attends to.

Each slot stores the position of its token, so that masks and position biases do not depend on the layout.
The arrays of `extend` have their slots on axis 2: [B, K, S, ...], or [pages, K, size, ...].
"""

import dataclasses
from typing import ClassVar, Protocol, Self

import flax
import jax
import jax.numpy as jnp

from tformer_jax.base.errors import UserError

EMPTY = -1
"""Position of padding tokens and of empty slots."""


@flax.struct.dataclass
class Tokens:
    """Positions and columns of the tokens in a cache, or of the tokens of one call."""

    positions: jax.Array
    """int32 [B, S]: positions in the row; `EMPTY` for padding and empty slots."""
    columns: jax.Array
    """int32 [B, S]: column of the token in its call, by which `BeamAncestry` identifies beams."""

    @classmethod
    def of_call(cls, positions: jax.Array) -> "Tokens":
        """Returns the tokens of one call from their positions, int32 [B, T]."""
        return cls(positions, jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape))

    @classmethod
    def empty(cls, batch: int, slots: int) -> "Tokens":
        """Returns `slots` empty slots per row."""
        return cls(jnp.full((batch, slots), EMPTY, jnp.int32), jnp.zeros((batch, slots), jnp.int32))


@flax.struct.dataclass
class BeamAncestry:
    """Ancestors of each of T beams, which are the tokens of one call: a beam attends only to its ancestors."""

    ancestors: jax.Array
    """int32 [B, T, A]: for each beam, the index of its ancestor at position `start + a` among the tokens of that call.

    For the newest token, it is its own index.
    """
    start: jax.Array
    """int32 [B]: all beams may attend to tokens before this position."""

    def may_attend(self, keys: Tokens) -> jax.Array:
        """Returns the mask bool [B, 1, T, S] for keys [B, S]."""
        offsets = jnp.clip(keys.positions - self.start[:, None], 0, self.ancestors.shape[2] - 1)
        ancestors = jnp.take_along_axis(self.ancestors, offsets[:, None], axis=2)
        common = keys.positions < self.start[:, None]
        return (common[:, None] | (ancestors == keys.columns[:, None]))[:, None]

    def unused(self, tokens: Tokens) -> jax.Array:
        """Returns bool [B, S]: the slots that are empty, or that hold a token without running descendants."""
        return (tokens.positions == EMPTY) | ~self.may_attend(tokens).any(axis=(1, 2))

    def parents(self, positions: jax.Array) -> jax.Array:
        """Returns the column of each token's parent in the previous call, 0 in the prompt: int32 [B, T].

        `positions`: int32 [B, T], the positions of the tokens.
        """
        offsets = (positions - 1 - self.start[:, None])[..., None]
        parents = jnp.take_along_axis(self.ancestors, jnp.clip(offsets, 0, self.ancestors.shape[2] - 1), axis=2)
        return jnp.where(offsets < 0, 0, parents)[..., 0]


class Slots(Protocol):
    """A slot layout. Each call runs `allocate`, then `extend` for every array of keys or values, then `end_call`."""

    tokens: Tokens
    in_place: ClassVar[bool]
    """Whether attention reads the stored entries in place, by `paged.attend_pages`."""

    def allocate(self, new: Tokens, ancestry: BeamAncestry | None = None) -> tuple[Self, Tokens]:
        """Assigns slots to T tokens, at consecutive positions or, with an `ancestry`, all at one position of their row.

        Returns:
            The updated layout, and the tokens [B, S] that this call attends to.
        """

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Writes the keys or values of the call's tokens, `new` [B, K, T, ...], into `old`.

        Returns:
            The updated `old`, and the array that this call attends to, [B, K, S, ...], ordered as `allocate`'s tokens.
        """

    def end_call(self) -> Self:
        """Discards the state of the current call, so that shapes are the same before every call."""

    def remove_newest(self, counts: jax.Array) -> Self:
        """Removes the newest `counts` tokens (int32 [B]) of each row; no padding may follow them in their call."""


@flax.struct.dataclass
class DenseSlots:
    """Consecutive slots with one index shared by all rows: a call writes the next T slots of every row."""

    in_place: ClassVar[bool] = False
    tokens: Tokens
    index: jax.Array
    """int32 scalar: slots written so far."""

    @classmethod
    def empty(cls, batch: int, slots: int) -> "DenseSlots":
        """Returns an empty layout with `slots` slots per row."""
        return cls(Tokens.empty(batch, slots), jnp.zeros((), jnp.int32))

    def allocate(self, new: Tokens, ancestry: BeamAncestry | None = None) -> tuple["DenseSlots", Tokens]:
        """See `Slots`; the tokens take the next T slots of all rows, whatever their positions are."""
        T = new.positions.shape[1]
        check_capacity(self.index + T, self.tokens)
        tokens = jax.tree.map(lambda old, new: _write(old, new, self.index, axis=1), self.tokens, new)
        return DenseSlots(tokens, self.index + T), tokens

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        stored = _write(old, new, self.index - new.shape[2], axis=2)
        return stored, stored

    def end_call(self) -> "DenseSlots":
        return self

    def remove_newest(self, counts: jax.Array) -> "DenseSlots":
        """See `Slots`; trailing slots that become empty in all rows are reused."""
        return DenseSlots(_without_newest(self.tokens, counts), self.index - counts.min())


@flax.struct.dataclass
class RingSlots:
    """Ring buffer of each row's newest tokens, for sliding-window layers.

    The `width` slots of a position begin at `position % window * width`: a token overwrites one that is outside of all
    later windows. In a call with several positions, the tokens attend to the ring before the call and to each other,
    because the last tokens may overwrite entries that the first tokens still attend to.
    """

    in_place: ClassVar[bool] = False
    tokens: Tokens
    added: jax.Array
    """int32 [B, T]: slots of the current call's tokens, S for tokens that are not stored; [B, 0] between calls."""
    width: int = flax.struct.field(pytree_node=False, default=1)
    """Maximum number of tokens at one position."""
    one_position: bool = flax.struct.field(pytree_node=False, default=False)
    """Whether all tokens of the call are at one position of their row."""

    @classmethod
    def empty(cls, batch: int, window: int, width: int) -> "RingSlots":
        """Returns an empty layout with `width` slots for each of `window` positions."""
        return cls(Tokens.empty(batch, window * width), jnp.zeros((batch, 0), jnp.int32), width)

    def allocate(self, new: Tokens, ancestry: BeamAncestry | None = None) -> tuple["RingSlots", Tokens]:
        S = self.tokens.positions.shape[1]
        window = S // self.width
        newest = new.positions.max(axis=1, keepdims=True, initial=EMPTY)
        stays = (new.positions != EMPTY) & (new.positions > newest - window)
        added = jnp.where(stays, new.positions % window * self.width + new.columns % self.width, S)
        tokens = jax.tree.map(lambda old, new: write_at(old, new, added), self.tokens, new)
        after = dataclasses.replace(
            self, tokens=tokens, added=added, one_position=ancestry is not None or new.positions.shape[1] == 1
        )
        return after, tokens if after.one_position else jax.tree.map(_concatenate, self.tokens, new)

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        stored = write_at(old, new, self.added)
        return stored, stored if self.one_position else _concatenate(old, new, axis=2)

    def end_call(self) -> "RingSlots":
        return dataclasses.replace(self, added=self.added[:, :0], one_position=False)

    def remove_newest(self, counts: jax.Array) -> "RingSlots":
        """See `Slots`; at most one token per row: with more, the window would again include overwritten tokens."""
        return dataclasses.replace(self, tokens=_without_newest(self.tokens, counts))


def check_capacity(used: jax.Array, tokens: Tokens) -> None:
    """Raises `UserError` if more slots are used than exist.

    Not checked inside compiled functions, where tokens beyond the last slot are dropped or overwrite others.
    """
    slots = tokens.positions.shape[1]
    if not isinstance(used, jax.core.Tracer) and (largest := int(used.max(initial=0))) > slots:
        raise UserError(f"{largest} tokens do not fit a cache of {slots} slots; pass a larger length to `init_cache`")


def _without_newest(tokens: Tokens, counts: jax.Array) -> Tokens:
    """Empties the slots of the `counts` (int32 [B]) newest tokens of each row, assuming one token per position."""
    newest = tokens.positions.max(axis=1) - counts
    return Tokens(jnp.where(tokens.positions > newest[:, None], EMPTY, tokens.positions), tokens.columns)


def _write(old: jax.Array, new: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), index, axis)


def write_at(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes new [B, T] or [B, K, T, ...] to slots int32 [B, T] of each row; drops tokens beyond the last slot."""
    rows = jnp.arange(old.shape[0])[:, None]
    if old.ndim == 2:
        return old.at[rows, slots].set(new, mode="drop")
    return old.at[rows, :, slots].set(jnp.swapaxes(new, 1, 2).astype(old.dtype), mode="drop")


def _concatenate(old: jax.Array, new: jax.Array, axis: int = 1) -> jax.Array:
    return jnp.concatenate([old, new.astype(old.dtype)], axis)
