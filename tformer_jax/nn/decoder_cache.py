"""The cache of a decoder: the caches of its layers, and the slots, positions and lengths that they share."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.kv_cache import LayerCache, LayerState, RowState, TokenCache
from tformer_jax.nn.row_slots import PagedSlots, Rows, RowSlots, resize_axis, set_rows
from tformer_jax.nn.slots import EMPTY, BeamAncestry, DenseSlots, RingSlots, Slots, Tokens


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
        self, padding_mask: jax.Array, ancestry: BeamAncestry | None = None
    ) -> tuple["DecoderCache", jax.Array, dict[str, Tokens]]:
        """Assigns positions and slots to T new tokens.

        The positions are consecutive or, with an `ancestry`, the same for all tokens of a row.

        Args:
            padding_mask: bool [B, T], True for tokens that are not padding.

        Returns:
            The cache with updated slots and lengths (layers write keys and values later), the tokens' positions
            (int32 [B, T]; 0 for padding before the first token), and the tokens that each kind of layer attends to.

        Raises:
            UserError: the tokens do not fit; checked only outside of compiled functions.
        """
        if ancestry is not None:
            after, counts = jnp.zeros(padding_mask.shape, jnp.int32), padding_mask.any(axis=1).astype(jnp.int32)
        else:
            after, counts = (
                jnp.cumsum(padding_mask, axis=1, dtype=jnp.int32) - 1,
                padding_mask.sum(axis=1, dtype=jnp.int32),
            )
        positions = self.lengths[:, None] + after
        new = Tokens.of_call(jnp.where(padding_mask, positions, EMPTY))
        allocated = {kind: slots.allocate(new, ancestry) for kind, slots in self.slots.items()}
        updated = dataclasses.replace(
            self, slots={kind: slots for kind, (slots, _) in allocated.items()}, lengths=self.lengths + counts
        )
        return updated, jnp.maximum(positions, 0), {kind: attended for kind, (_, attended) in allocated.items()}

    @property
    def row_slots(self) -> dict[str, RowSlots]:
        """The slot layouts of the caches of `row_cache` and `paged_cache`."""
        return cast(dict[str, RowSlots], self.slots)

    @property
    def first_slots(self) -> RowSlots:
        """One of `row_slots`; all kinds of layers have the same slots."""
        return next(iter(self.row_slots.values()))

    def take(self, rows: Rows, pages: int | None = None) -> "DecoderCache":
        """Returns the cache for calls that read and write `rows`, limited to their first `pages` pages."""

        def part(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[rows], tree)

        return dataclasses.replace(
            self,
            layers=tuple(LayerCache(own.self_attention.take(rows), part(own.cross_attention)) for own in self.layers),
            slots={kind: slots.take(rows, pages) for kind, slots in self.row_slots.items()},
            memory_padding_mask=part(self.memory_padding_mask),
            lengths=self.lengths[rows],
            prefix=part(self.prefix),
        )

    def put(self, rows: Rows, read: "DecoderCache") -> "DecoderCache":
        """Replaces `rows` by `read`, a result of `take` after further calls; encoder outputs stay as they are."""
        return dataclasses.replace(
            self,
            layers=tuple(
                LayerCache(own.self_attention.put(rows, new.self_attention), own.cross_attention)
                for own, new in zip(self.layers, read.layers, strict=True)
            ),
            slots={kind: slots.put(rows, read.row_slots[kind]) for kind, slots in self.row_slots.items()},
            lengths=set_rows(self.lengths, rows, read.lengths),
        )

    def start(self, rows: jax.Array, filled: jax.Array, tables: jax.Array, prefix: jax.Array) -> "DecoderCache":
        """Empties `rows` for new texts.

        Args:
            rows, filled, tables: as in `RowSlots.start`.
            prefix: int32 [P], see `DecoderCache.prefix`; not used if that is None.
        """
        return dataclasses.replace(
            self,
            layers=tuple(LayerCache(own.self_attention.clear(rows), own.cross_attention) for own in self.layers),
            slots={kind: slots.start(rows, filled, tables) for kind, slots in self.row_slots.items()},
            lengths=set_rows(self.lengths, rows, filled),
            prefix=None if self.prefix is None else set_rows(self.prefix, rows, prefix),
        )

    def fork(self, source: jax.Array, to: jax.Array, table: jax.Array, copies: jax.Array) -> "DecoderCache":
        """Copies row `source` to row `to`; the arguments are as in `RowSlots.fork` and `RowSlots.fork_entries`."""

        def copied(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.at[to].set(leaf[source]), tree)

        def layer(own: LayerCache) -> LayerCache:
            entries = own.self_attention.fork(self.first_slots, source, to, copies)
            return LayerCache(entries, copied(own.cross_attention))

        rest = copied(dataclasses.replace(self, layers=(), slots={}))
        slots = {kind: slots.fork(source, to, table) for kind, slots in self.row_slots.items()}
        return dataclasses.replace(rest, layers=tuple(map(layer, self.layers)), slots=slots)

    def resize(self, slots: int, source: int) -> "DecoderCache":
        """Pads or cuts the cache to `slots` slots per row, and to an encoder's output of `source` tokens."""

        def layer(own: LayerCache) -> LayerCache:
            cross = jax.tree.map(lambda leaf: resize_axis(leaf, source, 2), own.cross_attention)
            return LayerCache(own.self_attention.resize(self.first_slots, slots), cross)

        return dataclasses.replace(
            self,
            layers=tuple(map(layer, self.layers)),
            slots={kind: layout.resize(slots) for kind, layout in self.row_slots.items()},
            memory_padding_mask=jax.tree.map(lambda mask: resize_axis(mask, source, 1), self.memory_padding_mask),
        )

    def add_pages(self, pages: int) -> "DecoderCache":
        """Adds empty pages to the pool of `paged_cache`, up to `pages`."""
        layers = tuple(LayerCache(own.self_attention.add_pages(pages), own.cross_attention) for own in self.layers)
        return dataclasses.replace(self, layers=layers)

    def set_tables(self, rows: jax.Array, tables: jax.Array) -> "DecoderCache":
        """Sets the page tables of `rows`, int32 [P], to `tables`, int32 [P, pages]."""
        slots: dict[str, Slots] = {kind: slots.set_tables(rows, tables) for kind, slots in self.row_slots.items()}
        return dataclasses.replace(self, slots=slots)

    def has_room(self, counts: jax.Array) -> jax.Array:
        """Returns whether `counts` (int32 [B]) more tokens fit, bool [B]; only for `row_cache` and `paged_cache`."""
        return self.first_slots.index + counts <= self.first_slots.capacity

    def remove_newest(self, counts: jax.Array) -> "DecoderCache":
        """Removes the last `counts` (int32 [B]) tokens of each row.

        Caches whose rows share slots (`empty_cache`) remove at most one token per row, in the last column of a call.

        Raises:
            ValueError: a layer is recurrent: its state does not keep single tokens.
        """
        if not all(layer.self_attention.keeps_tokens for layer in self.layers):
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
        attention = cfg.attention_of(layer)
        if kinds.is_recurrent(attention):
            state: RowState = kinds.load(kinds.ATTENTIONS, attention).cache.empty(cfg, batch, width)
            return state
        return empty_entries(cfg, attention, *sizes[mask_kind(layer)]).stored(dtype)

    def layer_cache(number: int, layer: str) -> LayerCache:
        cross = None if cross_attention is None else cross_attention[number].stored(dtype)
        return LayerCache(self_attention(layer), cross)

    layers = tuple(itertools.starmap(layer_cache, enumerate(cfg.layer_kinds(cfg.decoder_layers))))
    return DecoderCache(layers, slots, memory_padding_mask, jnp.zeros((batch,), jnp.int32), prefix)
