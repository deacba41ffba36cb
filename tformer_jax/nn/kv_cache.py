"""Caches of layers for decoding: pytrees that each step takes as an argument and returns updated.

Each kind of attention has its own cache of a layer, either a `TokenCache` or a `RowState`.
"""

from typing import ClassVar, Self

import flax
import jax
import jax.numpy as jnp

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.row_slots import Rows, RowSlots, resize_axis, set_rows
from tformer_jax.nn.sharding import constrain
from tformer_jax.nn.slots import Slots


@flax.struct.dataclass
class Quantized:
    """Array quantized to int8, `values * scale`, with one scale per token and head."""

    values: jax.Array
    """int8 [..., H]."""
    scale: jax.Array
    """float32 [..., 1]: the largest magnitude of the H numbers, divided by 127."""

    @classmethod
    def quantize(cls, x: jax.Array) -> "Quantized":
        """Quantizes [..., H], rounding to nearest."""
        scale = jnp.abs(x).max(axis=-1, keepdims=True).astype(jnp.float32) / 127
        values = jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
        return cls(values, scale)

    def astype(self, dtype: str) -> jax.Array:
        """Dequantizes to [..., H] in a floating dtype."""
        return (self.values * self.scale).astype(dtype)


Stored = jax.Array | Quantized


def _is_quantized(x: object) -> bool:
    return isinstance(x, Quantized)


class LayerState:
    """Base class of what a layer keeps between calls, either entries of tokens or a state of each row.

    Subclasses are `flax.struct.dataclass`. Continuous batching reads and changes them only by these methods.
    """

    keeps_tokens: ClassVar[bool]
    """Whether single tokens can be removed."""

    def stored(self, dtype: str) -> Self:
        """Converts to a storage dtype, a floating dtype or `int8`, unless the dtype is fixed."""
        return self

    def constrained(self, rows: str | None) -> Self:
        """Constrains the arrays to be sharded over heads, and over the logical axis `rows` if they have rows."""
        raise NotImplementedError

    def take(self, rows: Rows) -> Self:
        """Returns what calls for `rows` read and write."""
        return self

    def put(self, rows: Rows, part: Self) -> Self:
        """Replaces the state of `rows` by `part`, a result of `take` after further calls."""
        return part

    def clear(self, rows: jax.Array) -> Self:
        """Returns the state for new texts in `rows`, int32 [P]."""
        return self

    def fork(self, slots: RowSlots, source: jax.Array, to: jax.Array, copies: jax.Array) -> Self:
        """Copies row `source` to row `to`; `copies` are as in `RowSlots.fork_entries`."""
        raise NotImplementedError

    def resize(self, slots: RowSlots, length: int) -> Self:
        """Pads or cuts the entries to `length` slots per row."""
        return self

    def add_pages(self, pages: int) -> Self:
        """Adds empty pages up to `pages`, if the entries lie in pages."""
        return self


class TokenCache(LayerState):
    """Base class of a layer's cache with one entry per token: arrays [B, K, S, ...], or [pages, K, page size, ...].

    `slots.Slots` decides which entry holds which token, so that entries of a row that ended are never read. Fields are
    `Stored`; K is 1 unless heads have their own entries.
    """

    keeps_tokens: ClassVar[bool] = True

    def unpack(self, dtype: str) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values that queries attend to, each [B, S, K, H], in a floating dtype."""
        raise NotImplementedError

    def stored(self, dtype: str) -> Self:
        def convert(x: Stored) -> Stored:
            return Quantized.quantize(jnp.asarray(x)) if dtype == "int8" else x.astype(dtype)

        return jax.tree.map(convert, self, is_leaf=_is_quantized)

    def extend(self, new: Self, slots: Slots) -> tuple[Self, Self]:
        """Writes `new` [B, K, T, ...] into `slots`; returns the updated cache, and the entries to attend to."""
        first = jax.tree.leaves(self, is_leaf=_is_quantized)[0]
        dtype = "int8" if isinstance(first, Quantized) else str(first.dtype)
        leaves, structure = jax.tree.flatten(self)
        pairs = map(slots.extend, leaves, jax.tree.leaves(new.stored(dtype)))
        updated, attended = zip(*pairs, strict=True)
        return jax.tree.unflatten(structure, updated), jax.tree.unflatten(structure, attended)

    def constrained(self, rows: str | None) -> Self:
        return jax.tree.map(lambda leaf: constrain(leaf, rows, axes.KV_HEADS, None, None), self)

    def fork(self, slots: RowSlots, source: jax.Array, to: jax.Array, copies: jax.Array) -> Self:
        return jax.tree.map(lambda leaf: slots.fork_entries(leaf, source, to, copies), self)

    def resize(self, slots: RowSlots, length: int) -> Self:
        return jax.tree.map(lambda leaf: slots.resize_entries(leaf, length), self)

    def add_pages(self, pages: int) -> Self:
        return jax.tree.map(lambda pool: resize_axis(pool, pages, 0), self)


class RowState(LayerState):
    """Base class of a layer's recurrent state, whose size does not depend on the number of tokens.

    Arrays are [B, W, N, ...]: a row has W columns, one per beam, and N heads. Without an ancestry, a call continues the
    state of column 0. The dtype is fixed.
    """

    keeps_tokens: ClassVar[bool] = False

    def constrained(self, rows: str | None) -> Self:
        def sharded(leaf: jax.Array) -> jax.Array:
            return constrain(leaf, axes.BATCH, None, axes.HEADS, *[None] * (leaf.ndim - 3))

        return jax.tree.map(sharded, self)

    def take(self, rows: Rows) -> Self:
        return jax.tree.map(lambda leaf: leaf[rows], self)

    def put(self, rows: Rows, part: Self) -> Self:
        return set_rows(self, rows, part)

    def clear(self, rows: jax.Array) -> Self:
        return jax.tree.map(lambda leaf: leaf.at[rows].set(0, mode="drop"), self)

    def fork(self, slots: RowSlots, source: jax.Array, to: jax.Array, copies: jax.Array) -> Self:
        return jax.tree.map(lambda leaf: leaf.at[to].set(leaf[source]), self)


@flax.struct.dataclass
class KeyValues(TokenCache):
    """Keys and values of one attention layer, each [B, K, S, H]; decoding steps read this layout without a copy."""

    k: Stored
    v: Stored

    @classmethod
    def empty(cls, cfg: ModelConfig, rows: int, slots: int) -> "KeyValues":
        """Returns zeros of `cfg.dtype` for K heads of size H."""
        zeros = jnp.zeros((rows, cfg.kv_heads, slots, cfg.head_size), cfg.dtype)
        return cls(zeros, zeros)

    @classmethod
    def pack(cls, k: jax.Array, v: jax.Array) -> "KeyValues":
        """Packs keys and values [B, S, K, H]."""
        return cls(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))

    def unpack(self, dtype: str) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [B, S, K, H] in a floating dtype."""
        return jnp.swapaxes(self.k.astype(dtype), 1, 2), jnp.swapaxes(self.v.astype(dtype), 1, 2)


@flax.struct.dataclass
class LayerCache:
    """Cache of one layer."""

    self_attention: LayerState
    cross_attention: TokenCache | None
    """Computed once from the encoder's output; None in a decoder-only model."""
