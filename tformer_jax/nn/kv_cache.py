"""Caches for decoding: pytrees that each step takes as an argument and returns updated.

Each kind of attention has its own cache of a layer, either a `TokenCache` or a `RowState`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self, cast

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.slots import EMPTY, DenseSlots, PagedSlots, RingSlots, RowSlots, Slots, Tokens


@flax.struct.dataclass
class Quantized:
    """Array quantized to int8, `values * scale`, with one scale per token and head."""

    values: jax.Array
    """int8 [..., H]."""
    scale: jax.Array
    """float32 [..., 1]: the largest magnitude of the H numbers, divided by 127."""

    @classmethod
    def of(cls, x: jax.Array) -> "Quantized":
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


class TokenCache:
    """Base class of a layer's cache with one entry per token: arrays [B, K, S, ...], or [pages, K, page size, ...].

    Which entry holds which token is decided by `slots.Slots`. Subclasses are `flax.struct.dataclass` with `Stored`
    fields, in which K is 1 unless heads have their own entries.
    """

    def unpack(self, dtype: str) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values that queries attend to, each [B, S, K, H], in a floating dtype."""
        raise NotImplementedError

    def stored(self, dtype: str) -> Self:
        """Converts to a storage dtype: a floating dtype or `int8`."""

        def convert(x: Stored) -> Stored:
            return Quantized.of(jnp.asarray(x)) if dtype == "int8" else x.astype(dtype)

        return jax.tree.map(convert, self, is_leaf=_is_quantized)

    def extend(self, new: Self, slots: Slots) -> tuple[Self, Self]:
        """Writes `new` [B, K, T, ...] into `slots`; returns the updated cache, and the entries to attend to."""
        first = jax.tree.leaves(self, is_leaf=_is_quantized)[0]
        dtype = "int8" if isinstance(first, Quantized) else str(first.dtype)
        leaves, structure = jax.tree.flatten(self)
        pairs = map(slots.extend, leaves, jax.tree.leaves(new.stored(dtype)))
        updated, attended = zip(*pairs, strict=True)
        return jax.tree.unflatten(structure, updated), jax.tree.unflatten(structure, attended)


class RowState:
    """Base class of a layer's recurrent state, whose size does not depend on the number of tokens.

    Subclasses are `flax.struct.dataclass` with arrays [B, W, N, ...]: a row has W columns, one per beam, and N heads.
    Without an ancestry, a call continues the state of column 0.
    """

    def stored(self, dtype: str) -> Self:
        """Returns the state unchanged: its dtype is fixed."""
        return self


LayerState = TokenCache | RowState


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

    def parents(self, positions: jax.Array) -> jax.Array:
        """Returns the column of each token's parent in the previous call, 0 in the prompt: int32 [B, T].

        `positions`: int32 [B, T], the positions of the tokens.
        """
        offsets = (positions - 1 - self.start[:, None])[..., None]
        found = jnp.take_along_axis(self.ancestors, jnp.clip(offsets, 0, self.ancestors.shape[2] - 1), axis=2)
        return jnp.where(offsets < 0, 0, found)[..., 0]


@flax.struct.dataclass
class DecoderCache:
    """State of a decoder: the keys, values and positions of the tokens so far.

    Positions count real tokens only, so that rows may be padded on the left.
    """

    layers: tuple[LayerCache, ...]
    slots: dict[str, Slots]
    """Slot layouts by `mask_kind` of layers."""
    memory_padding_mask: jax.Array | None
    """bool [B, S]: True for tokens of the encoder's input that are not padding."""
    lengths: jax.Array
    """int32 [B]: the position of the next token."""
    prefix: jax.Array | None = None
    """int32 [B]: number of leading tokens that all tokens of the row may attend to; None: 0."""

    def allocate(
        self, padding_mask: jax.Array, *, same_position: bool = False
    ) -> tuple["DecoderCache", jax.Array, dict[str, Tokens]]:
        """Assigns positions and slots to T new tokens, of which those in `padding_mask` (bool [B, T]) are real.

        The positions are consecutive or, if `same_position`, the same for all tokens of a row.

        Returns:
            The cache with updated slots and lengths (layers write keys and values later), the tokens' positions
            (int32 [B, T]; 0 for padding before the first token), and the tokens that each kind of layer attends to.

        Raises:
            ConfigError: the tokens do not fit; checked only outside of compiled functions.
        """
        if same_position:
            after, counts = jnp.zeros(padding_mask.shape, jnp.int32), padding_mask.any(axis=1).astype(jnp.int32)
        else:
            after, counts = (
                jnp.cumsum(padding_mask, axis=1, dtype=jnp.int32) - 1,
                padding_mask.sum(axis=1, dtype=jnp.int32),
            )
        positions = self.lengths[:, None] + after
        new = Tokens.of_call(jnp.where(padding_mask, positions, EMPTY))
        allocated = {kind: slots.allocate(new, same_position=same_position) for kind, slots in self.slots.items()}
        updated = dataclasses.replace(
            self, slots={kind: slots for kind, (slots, _) in allocated.items()}, lengths=self.lengths + counts
        )
        return updated, jnp.maximum(positions, 0), {kind: attended for kind, (_, attended) in allocated.items()}

    def compact(self, ancestry: BeamAncestry, rows: jax.Array) -> "DecoderCache":
        """Removes the tokens that no beam may attend to, and moves the others to the first slots of their row.

        After some steps, all beams of a row have the same ancestors at early positions, one slot each instead of one
        per beam. Only for the caches of `row_cache` and `paged_cache`, in which all kinds of layers have the same
        slots. `rows`, bool [B], are the rows to compact; others are unchanged.
        """
        slots = cast(dict[str, RowSlots], self.slots)
        first = next(iter(slots.values()))
        used = ancestry.may_attend(first.tokens).any(axis=(1, 2)) & (first.tokens.positions != EMPTY)
        same = jnp.arange(used.shape[1])
        order = jnp.where(rows[:, None], jnp.argsort(~used, axis=1, stable=True), same)
        counts = jnp.where(rows, used.sum(axis=1, dtype=jnp.int32), first.index)

        def compacted(state: LayerState) -> LayerState:
            return state if isinstance(state, RowState) else jax.tree.map(lambda leaf: first.move(leaf, order), state)

        layers = tuple(LayerCache(compacted(layer.self_attention), layer.cross_attention) for layer in self.layers)
        return dataclasses.replace(
            self, layers=layers, slots={kind: layout.reorder(order, counts) for kind, layout in slots.items()}
        )

    def remove_newest(self, counts: jax.Array) -> "DecoderCache":
        """Removes the last `counts` (int32 [B]) tokens of each row.

        Caches whose rows share slots (`empty_cache`) remove at most one token per row, in the last column of a call.

        Raises:
            ValueError: a layer is recurrent: its state does not keep single tokens.
        """
        if any(isinstance(layer.self_attention, RowState) for layer in self.layers):
            raise ValueError("tokens cannot be removed from the states of recurrent layers")
        slots = {kind: slots.remove_newest(counts) for kind, slots in self.slots.items()}
        return dataclasses.replace(self, slots=slots, lengths=jnp.maximum(self.lengths - counts, 0))


def empty_cache(
    cfg: ModelConfig,
    batch: int,
    length: int,
    *,
    width: int = 1,
    dtype: str | None = None,
    cross_attention: Sequence[TokenCache] | None = None,
    memory_padding_mask: jax.Array | None = None,
    prefix: jax.Array | None = None,
) -> DecoderCache:
    """Builds an empty cache for `length` positions per row.

    Args:
        width: maximum number of tokens at one position.
        dtype: storage dtype, a floating dtype or `int8`; None: `cfg.dtype`.
        cross_attention: one entry per layer.
        prefix: int32 [B], see `DecoderCache`.
    """
    slots: dict[str, Slots] = {}
    for kind in mask_kinds(cfg):
        if kind == "window" and cfg.window is not None and cfg.window < length:
            slots[kind] = RingSlots.empty(batch, cfg.window, width)
        else:
            slots[kind] = DenseSlots.empty(batch, length * width)
    sizes = {kind: (batch, layout.tokens.positions.shape[1]) for kind, layout in slots.items()}
    return _cache(cfg, slots, sizes, width, dtype, cross_attention, memory_padding_mask, prefix)


def row_cache(cfg: ModelConfig, batch: int, length: int, *, width: int = 1, dtype: str | None = None) -> DecoderCache:
    """Builds an empty cache for `length` tokens per row, like `empty_cache`, in which rows may differ in length."""
    slots: dict[str, Slots] = {kind: RowSlots.empty(batch, length) for kind in mask_kinds(cfg)}
    return _cache(cfg, slots, dict.fromkeys(slots, (batch, length)), width, dtype)


def paged_cache(
    cfg: ModelConfig,
    batch: int,
    *,
    pages: int,
    page_size: int,
    pages_per_row: int,
    width: int = 1,
    dtype: str | None = None,
) -> DecoderCache:
    """Builds an empty cache whose rows share `pages` pages of `page_size` tokens; page 0 is reserved."""
    slots: dict[str, Slots] = {
        kind: PagedSlots.without_pages(batch, pages_per_row, page_size) for kind in mask_kinds(cfg)
    }
    prefix = jnp.zeros((batch,), jnp.int32) if cfg.prefix_lm else None
    return _cache(cfg, slots, dict.fromkeys(slots, (pages, page_size)), width, dtype, prefix=prefix)


def mask_kind(layer: str) -> str:
    """Returns the key, "full" or "window", of the masks, slots and positions that a kind of layer uses."""
    return "window" if layer == "window" else "full"


def mask_kinds(cfg: ModelConfig) -> list[str]:
    """Returns the distinct `mask_kind` of all layers, sorted, so that every process traces the same program."""
    return sorted({mask_kind(layer) for layer in cfg.layer_pattern})


def empty_entries(cfg: ModelConfig, attention: str, rows: int, slots: int) -> TokenCache:
    """Returns the empty cache of a layer with this kind of attention, which has entries for tokens."""
    entries: TokenCache = kinds.load(kinds.ATTENTIONS, attention).cache.empty(cfg, rows, slots)
    return entries


def _cache(
    cfg: ModelConfig,
    slots: dict[str, Slots],
    sizes: dict[str, tuple[int, int]],
    width: int,
    dtype: str | None,
    cross_attention: Sequence[TokenCache] | None = None,
    memory_padding_mask: jax.Array | None = None,
    prefix: jax.Array | None = None,
) -> DecoderCache:
    """Builds a cache without tokens; `sizes`, by `mask_kind`, are (rows, slots), or (pages, page size) of a pool."""
    dtype = dtype or cfg.dtype
    (batch, _) = next(iter(slots.values())).tokens.positions.shape

    def self_attention(layer: str) -> LayerState:
        attention = kinds.LAYERS[layer] or cfg.attention
        if attention in kinds.RECURRENT:
            state: RowState = kinds.load(kinds.ATTENTIONS, attention).cache.empty(cfg, batch, width)
            return state
        return empty_entries(cfg, attention, *sizes[mask_kind(layer)]).stored(dtype)

    def layer_cache(number: int) -> LayerCache:
        cross = None if cross_attention is None else cross_attention[number].stored(dtype)
        return LayerCache(self_attention(cfg.layer_pattern[number % len(cfg.layer_pattern)]), cross)

    layers = tuple(layer_cache(number) for number in range(cfg.decoder_layers))
    return DecoderCache(layers, slots, memory_padding_mask, jnp.zeros((batch,), jnp.int32), prefix)
