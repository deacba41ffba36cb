"""Where a cache keeps tokens: which slots a call writes and which it attends to.

Each slot knows the position of its token, so that masks and position biases need not know how a cache is laid out.
All arrays that `extend` takes have slots on their third axis: [B, K, S, ...], or [pages, K, size, ...].
"""

import dataclasses
from typing import Protocol, Self

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import ConfigError

EMPTY = -1
"""The position of no token: of padding, and of a slot that holds nothing."""


@flax.struct.dataclass
class Tokens:
    """What is known of tokens besides their keys and values."""

    positions: jax.Array
    """int32 [B, S]: places in the row; `EMPTY` for none."""
    columns: jax.Array
    """int32 [B, S]: places within the call that read them; beams are told apart by it."""

    @classmethod
    def of_call(cls, positions: jax.Array) -> "Tokens":
        """The tokens of one call: positions int32 [B, T]."""
        return cls(positions, jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape))

    @classmethod
    def none(cls, batch: int, slots: int) -> "Tokens":
        """Empty slots."""
        return cls(jnp.full((batch, slots), EMPTY), jnp.zeros((batch, slots), jnp.int32))


class Slots(Protocol):
    """A layout. `admit` takes note of a call's tokens, `extend` puts their keys and values in; `settled` follows."""

    tokens: Tokens

    def admit(self, new: Tokens, *, side_by_side: bool = False) -> tuple[Self, Tokens]:
        """Takes T tokens, which follow each other or stand `side_by_side` at one position of their row.

        Returns:
            The layout that holds them, and the tokens [B, S] that they may attend to.
        """

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Puts the tokens of `new` ([B, K, T, ...], admitted before) into `old`.

        Returns:
            What to keep, like `old`, and what this call attends to, [B, K, S, ...], in the order of `admit`'s tokens.
        """

    def settled(self) -> Self:
        """The layout between two calls: all arrays have the shapes that they had before the last one."""

    def forget(self, counts: jax.Array) -> Self:
        """The layout without so many of each row's newest tokens, int32 [B]: those after no others in their call."""


@flax.struct.dataclass
class DenseSlots:
    """One slot after the other; all rows write the same ones."""

    tokens: Tokens
    index: jax.Array
    """int32 scalar: slots written so far."""

    @classmethod
    def empty(cls, batch: int, slots: int) -> "DenseSlots":
        """Room for `slots` tokens in each row."""
        return cls(Tokens.none(batch, slots), jnp.zeros((), jnp.int32))

    def admit(self, new: Tokens, *, side_by_side: bool = False) -> tuple["DenseSlots", Tokens]:
        """See `Slots`."""
        T = new.positions.shape[1]
        _check_room(self.index + T, self.tokens)
        tokens = jax.tree.map(lambda old, new: _put(old, new, self.index, axis=1), self.tokens, new)
        return DenseSlots(tokens, self.index + T), tokens

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Slots`."""
        kept = _put(old, new, self.index - new.shape[2], axis=2)
        return kept, kept

    def settled(self) -> "DenseSlots":
        """See `Slots`."""
        return self

    def forget(self, counts: jax.Array) -> "DenseSlots":
        """See `Slots`; slots that all rows leave are written anew."""
        return DenseSlots(_without_newest(self.tokens, counts), self.index - counts.min())


@flax.struct.dataclass
class RingSlots:
    """The newest tokens of each row only, for layers that see a window: the slot of a token follows from its position.

    A token overwrites one that has left every window. Tokens of one call at several positions attend to the ring before
    the call and to each other, since the last of them may overwrite what the first still sees.
    """

    tokens: Tokens
    added: jax.Array
    """int32 [B, T]: the slots of a call's tokens, or S for those that are not kept; [B, 0] between two calls."""
    width: int = flax.struct.field(pytree_node=False, default=1)
    """Tokens at one position."""
    one_position: bool = flax.struct.field(pytree_node=False, default=False)
    """All tokens of the call stand at one position of their row."""

    @classmethod
    def empty(cls, batch: int, window: int, width: int) -> "RingSlots":
        """`width` slots for each of `window` positions."""
        return cls(Tokens.none(batch, window * width), jnp.zeros((batch, 0), jnp.int32), width)

    def admit(self, new: Tokens, *, side_by_side: bool = False) -> tuple["RingSlots", Tokens]:
        """See `Slots`."""
        S = self.tokens.positions.shape[1]
        window = S // self.width
        newest = new.positions.max(axis=1, keepdims=True, initial=EMPTY)
        kept = (new.positions != EMPTY) & (new.positions > newest - window)
        added = jnp.where(kept, new.positions % window * self.width + new.columns % self.width, S)
        tokens = jax.tree.map(lambda old, new: _put_at(old, new, added), self.tokens, new)
        after = dataclasses.replace(
            self, tokens=tokens, added=added, one_position=side_by_side or new.positions.shape[1] == 1
        )
        return after, tokens if after.one_position else jax.tree.map(_joined, self.tokens, new)

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Slots`."""
        kept = _put_at(old, new, self.added)
        return kept, kept if self.one_position else _joined(old, new, axis=2)

    def settled(self) -> "RingSlots":
        """See `Slots`."""
        return dataclasses.replace(self, added=self.added[:, :0], one_position=False)

    def forget(self, counts: jax.Array) -> "RingSlots":
        """See `Slots`; one token in each row, since what several have overwritten is in the window again."""
        return dataclasses.replace(self, tokens=_without_newest(self.tokens, counts))


@flax.struct.dataclass
class RowSlots:
    """One slot after the other, each row at its own pace: a call's real tokens take the next slots of their row."""

    tokens: Tokens
    index: jax.Array
    """int32 [B]: slots written so far."""
    added: jax.Array
    """int32 [B, T]: the slots of a call's tokens, or S for padding; [B, 0] between two calls."""

    @classmethod
    def empty(cls, batch: int, slots: int) -> "RowSlots":
        """Room for `slots` tokens in each row."""
        return cls(Tokens.none(batch, slots), jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, 0), jnp.int32))

    def admit(self, new: Tokens, *, side_by_side: bool = False) -> tuple[Self, Tokens]:
        """See `Slots`."""
        real = new.positions != EMPTY
        S = self.tokens.positions.shape[1]
        added = jnp.where(real, self.index[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, S)
        tokens = jax.tree.map(lambda old, new: _put_at(old, new, added), self.tokens, new)
        index = self.index + real.sum(axis=1, dtype=jnp.int32)
        _check_room(index, self.tokens)
        return dataclasses.replace(self, tokens=tokens, index=index, added=added), tokens

    def settled(self) -> Self:
        """See `Slots`."""
        return dataclasses.replace(self, added=self.added[:, :0])

    def forget(self, counts: jax.Array) -> Self:
        """See `Slots`."""
        index = jnp.maximum(self.index - counts, 0)
        left = jnp.arange(self.tokens.positions.shape[1]) >= index[:, None]
        tokens = Tokens(jnp.where(left, EMPTY, self.tokens.positions), self.tokens.columns)
        return dataclasses.replace(self, tokens=tokens, index=index)

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Slots`."""
        kept = _put_at(old, new, self.added)
        return kept, kept


@flax.struct.dataclass
class PagedSlots(RowSlots):
    """Pages of one pool, given to rows by a table ("PagedAttention", 2023); page 0 is nobody's."""

    table: jax.Array
    """int32 [B, P]: the pages of each row; 0 where it has none."""

    @classmethod
    def unheld(cls, batch: int, pages: int, size: int) -> "PagedSlots":
        """Rows that have no page yet, and may get so many of this size."""
        rows = RowSlots.empty(batch, pages * size)
        return cls(rows.tokens, rows.index, rows.added, jnp.zeros((batch, pages), jnp.int32))

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Slots`; `old` is the pool [pages, K, size, ...]."""
        size, (B, P) = old.shape[2], self.table.shape
        own = jnp.take_along_axis(self.table, jnp.minimum(self.added // size, P - 1), axis=1)
        pages = jnp.where(self.added < P * size, own, 0)
        kept = old.at[pages, :, self.added % size].set(jnp.swapaxes(new, 1, 2).astype(old.dtype))
        seen = jnp.swapaxes(kept[self.table], 1, 2)
        return kept, seen.reshape(B, old.shape[1], P * size, *old.shape[3:])


def _check_room(used: jax.Array, tokens: Tokens) -> None:
    """Raises `ConfigError` if more slots are used than there are.

    Within a compiled function that is unknown: tokens beyond the last slot are lost or overwrite others.
    """
    slots = tokens.positions.shape[1]
    if not isinstance(used, jax.core.Tracer) and (most := int(used.max(initial=0))) > slots:
        raise ConfigError(f"{most} tokens do not fit a cache of {slots} slots; give `init_cache` a larger length")


def _without_newest(tokens: Tokens, counts: jax.Array) -> Tokens:
    """Without the newest tokens of each row, whose number is int32 [B]; none of them stand side by side."""
    newest = tokens.positions.max(axis=1) - counts
    return Tokens(jnp.where(tokens.positions > newest[:, None], EMPTY, tokens.positions), tokens.columns)


def _put(old: jax.Array, new: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), index, axis)


def _put_at(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes new [B, T] or [B, K, T, ...] to each row's slots, int32 [B, T]; those beyond the last one are dropped."""
    rows = jnp.arange(old.shape[0])[:, None]
    if old.ndim == 2:
        return old.at[rows, slots].set(new, mode="drop")
    return old.at[rows, :, slots].set(jnp.swapaxes(new, 1, 2).astype(old.dtype), mode="drop")


def _joined(old: jax.Array, new: jax.Array, axis: int = 1) -> jax.Array:
    return jnp.concatenate([old, new.astype(old.dtype)], axis)
