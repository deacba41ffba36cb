"""Slot layouts whose rows start, end and are copied independently, for continuous batching."""

import dataclasses
from typing import Any, ClassVar, Self

import flax
import jax
import jax.numpy as jnp

from tformer_jax.nn.slots import EMPTY, BeamAncestry, Tokens, check_capacity, write_at

Rows = jax.Array | slice
"""Rows of a cache: their indices, int32 [P], or `ALL`."""
ALL = slice(None)


def set_rows(every: Any, rows: Rows, some: Any) -> Any:
    """Sets `rows` of all arrays, [B, ...], to `some`, [P, ...]; ignores indices of at least B."""
    return jax.tree.map(lambda array, part: array.at[rows].set(part, mode="drop"), every, some)


def resize_axis(array: jax.Array, length: int, axis: int, value: int = 0) -> jax.Array:
    """Pads or cuts one axis of an array to `length` at its end."""
    widths = [(0, 0, 0)] * array.ndim
    widths[axis] = (0, length - array.shape[axis], 0)
    return jax.lax.pad(array, jnp.asarray(value, array.dtype), widths)


@flax.struct.dataclass
class RowSlots:
    """Slots with one index per row: a call writes its real tokens to the next slots of each row.

    Beams are written to the first slots that are empty or hold a token that no running beam descends from.
    """

    in_place: ClassVar[bool] = False
    tokens: Tokens
    index: jax.Array
    """int32 [B]: number of slots up to the last one in use."""
    added: jax.Array
    """int32 [B, T]: slots of the current call's tokens, S for padding; [B, 0] between calls."""

    @classmethod
    def empty(cls, batch: int, slots: int) -> "RowSlots":
        """Returns an empty layout with `slots` slots per row."""
        return cls(Tokens.empty(batch, slots), jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, 0), jnp.int32))

    @property
    def capacity(self) -> jax.Array | int:
        """Number of slots that a row may use, int32 [B] or the same for all rows."""
        return self.tokens.positions.shape[1]

    def allocate(self, new: Tokens, ancestry: BeamAncestry | None = None) -> tuple[Self, Tokens]:
        real = new.positions != EMPTY
        S = self.tokens.positions.shape[1]
        number = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
        used, chosen = self.index, self.index[:, None] + number
        if ancestry is not None:
            unused = ancestry.unused(self.tokens)
            used = jnp.where(unused, 0, jnp.arange(1, S + 1)).max(axis=1)
            chosen = (jnp.cumsum(unused, axis=1)[:, None] <= number[..., None]).sum(axis=2, dtype=jnp.int32)
        added = jnp.where(real, chosen, S)
        tokens = jax.tree.map(lambda old, new: write_at(old, new, added), self.tokens, new)
        index = jnp.where(real.any(axis=1), jnp.maximum(used, jnp.where(real, chosen + 1, 0).max(axis=1)), self.index)
        check_capacity(index, self.tokens)
        return dataclasses.replace(self, tokens=tokens, index=index, added=added), tokens

    def end_call(self) -> Self:
        return dataclasses.replace(self, added=self.added[:, :0])

    def take(self, rows: Rows, pages: int | None = None) -> Self:
        """Returns the layout for calls that read and write `rows`, limited to their first `pages` pages.

        Contiguous slots have no pages, and calls run for all rows.
        """
        return self

    def put(self, rows: Rows, part: Self) -> Self:
        """Replaces `rows` by `part`, a result of `take` after further calls."""
        return part

    def start(self, rows: jax.Array, filled: jax.Array, tables: jax.Array) -> Self:
        """Empties `rows` but for their first slots.

        Args:
            rows: int32 [P].
            filled: int32 [P], number of first slots that hold tokens of earlier requests.
            tables: int32 [P, pages], the pages of each row; not used by contiguous slots.
        """
        slots = jnp.arange(self.tokens.positions.shape[1])
        positions = jnp.where(slots < filled[:, None], slots, EMPTY)
        tokens = set_rows(self.tokens, rows, Tokens(positions, jnp.zeros_like(positions)))
        return dataclasses.replace(self, tokens=tokens, index=set_rows(self.index, rows, filled))

    def set_tables(self, rows: jax.Array, tables: jax.Array) -> Self:
        """Sets the pages of `rows`, int32 [P], to `tables`, int32 [P, pages]; contiguous slots have none."""
        return self

    def fork(self, source: jax.Array, to: jax.Array, table: jax.Array) -> Self:
        """Copies row `source` to row `to`, whose pages are `table`, int32 [pages]; the arguments are int32 scalars."""
        return jax.tree.map(lambda leaf: leaf.at[to].set(leaf[source]), self)

    def resize(self, slots: int) -> Self:
        """Adds empty slots up to `slots` per row, or removes the slots from `slots` on."""
        old = self.tokens
        tokens = Tokens(resize_axis(old.positions, slots, 1, EMPTY), resize_axis(old.columns, slots, 1))
        return dataclasses.replace(self, tokens=tokens)

    def resize_entries(self, entries: jax.Array, slots: int) -> jax.Array:
        """Pads or cuts the keys or values [B, K, S, ...] to `slots` per row."""
        return resize_axis(entries, slots, 2)

    def fork_entries(self, entries: jax.Array, source: jax.Array, to: jax.Array, copies: jax.Array) -> jax.Array:
        """Copies the keys or values of row `source` to row `to`; `copies` are the pages to copy, int32 [n, 2]."""
        return entries.at[to].set(entries[source])

    def remove_newest(self, counts: jax.Array) -> Self:
        index = jnp.maximum(self.index - counts, 0)
        left = jnp.arange(self.tokens.positions.shape[1]) >= index[:, None]
        tokens = Tokens(jnp.where(left, EMPTY, self.tokens.positions), self.tokens.columns)
        return dataclasses.replace(self, tokens=tokens, index=index)

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        stored = write_at(old, new, self.added)
        return stored, stored


@flax.struct.dataclass
class PagedSlots(RowSlots):
    """Pages of a shared pool, assigned to rows by a table ("PagedAttention", 2023); page 0 is reserved."""

    in_place: ClassVar[bool] = True
    table: jax.Array
    """int32 [B, P]: pages of each row; 0 for unassigned entries."""

    @classmethod
    def without_pages(cls, batch: int, pages: int, size: int) -> "PagedSlots":
        """Returns rows without pages, with tables of `pages` entries for pages of `size` tokens."""
        rows = RowSlots.empty(batch, pages * size)
        return cls(rows.tokens, rows.index, rows.added, jnp.zeros((batch, pages), jnp.int32))

    def take(self, rows: Rows, pages: int | None = None) -> Self:
        table = self.table[rows, :pages]
        tokens = jax.tree.map(lambda leaf: leaf[rows, : table.shape[1] * self.page_size], self.tokens)
        return type(self)(tokens, self.index[rows], self.added[rows], table)

    def put(self, rows: Rows, part: Self) -> Self:
        width = part.tokens.positions.shape[1]
        tokens = jax.tree.map(
            lambda every, some: every.at[rows, :width].set(some, mode="drop"), self.tokens, part.tokens
        )
        return dataclasses.replace(self, tokens=tokens, index=set_rows(self.index, rows, part.index))

    def start(self, rows: jax.Array, filled: jax.Array, tables: jax.Array) -> Self:
        return super().start(rows, filled, tables).set_tables(rows, tables)

    def set_tables(self, rows: jax.Array, tables: jax.Array) -> Self:
        return dataclasses.replace(self, table=set_rows(self.table, rows, tables))

    def fork(self, source: jax.Array, to: jax.Array, table: jax.Array) -> Self:
        copied = super().fork(source, to, table)
        return dataclasses.replace(copied, table=self.table.at[to].set(table))

    def resize(self, slots: int) -> Self:
        """Returns the layout unchanged: its tables have entries for the longest rows."""
        return self

    def resize_entries(self, entries: jax.Array, slots: int) -> jax.Array:
        """Returns the pool unchanged."""
        return entries

    def fork_entries(self, entries: jax.Array, source: jax.Array, to: jax.Array, copies: jax.Array) -> jax.Array:
        """Copies pages of the pool: `copies` are their numbers, (from, to); (0, 0) copies nothing."""
        return entries.at[copies[:, 1]].set(entries[copies[:, 0]])

    @property
    def capacity(self) -> jax.Array:
        """Number of slots in the pages of each row, int32 [B]."""
        return (self.table > 0).sum(axis=1, dtype=jnp.int32) * self.page_size

    @property
    def page_size(self) -> int:
        """Number of slots per page."""
        return self.tokens.positions.shape[1] // self.table.shape[1]

    def extend(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Writes the keys or values of the call's tokens, `new` [B, K, T, ...], into the pool `old`.

        Returns:
            The updated pool [pages, K, size, ...], twice: `paged.attend_pages` reads it in place.
        """
        pages, offsets = self._locate(self.added)
        stored = old.at[pages, :, offsets].set(jnp.swapaxes(new, 1, 2).astype(old.dtype))
        return stored, stored

    def _locate(self, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the pages and the offsets in them, int32 [B, T], of slots [B, T]; page 0 beyond the last slot."""
        size, P = self.page_size, self.table.shape[1]
        pages = jnp.take_along_axis(self.table, jnp.minimum(slots // size, P - 1), axis=1)
        return jnp.where(slots < P * size, pages, 0), slots % size
