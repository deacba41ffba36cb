"""Keys and values kept between decoding steps: plain pytrees that go in as arguments and come out as results."""

import dataclasses
from collections.abc import Sequence

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import ModelConfig
from tformer_jax.nn.slots import EMPTY, DenseSlots, PagedSlots, RingSlots, RowSlots, Slots, Tokens


@flax.struct.dataclass
class Quantized:
    """Numbers as `values * scale`, with one scale a token and head: a quarter of float32's size, and a little more."""

    values: jax.Array
    """int8 [..., H]."""
    scale: jax.Array
    """float32 [..., 1]: a 127th of the largest of the H numbers."""

    @classmethod
    def of(cls, x: jax.Array) -> "Quantized":
        """[..., H], rounded to the nearest."""
        scale = jnp.abs(x).max(axis=-1, keepdims=True).astype(jnp.float32) / 127
        values = jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
        return cls(values, scale)

    def astype(self, dtype: str) -> jax.Array:
        """[..., H] in a floating dtype."""
        return (self.values * self.scale).astype(dtype)


Stored = jax.Array | Quantized


@flax.struct.dataclass
class KeyValues:
    """Keys and values of one attention layer, each [B, K, S, H]: a decoding step reads this order without a copy."""

    k: Stored
    v: Stored

    @classmethod
    def pack(cls, k: jax.Array, v: jax.Array) -> "KeyValues":
        """From keys and values [B, S, K, H]."""
        return cls(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))

    def unpack(self, dtype: str) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H]."""
        return jnp.swapaxes(self.k.astype(dtype), 1, 2), jnp.swapaxes(self.v.astype(dtype), 1, 2)

    def stored(self, dtype: str) -> "KeyValues":
        """The same in a storage dtype: a floating one, or `int8`."""

        def convert(x: Stored) -> Stored:
            return Quantized.of(jnp.asarray(x)) if dtype == "int8" else x.astype(dtype)

        return KeyValues(convert(self.k), convert(self.v))

    def extend(self, new: "KeyValues", slots: Slots) -> tuple["KeyValues", "KeyValues"]:
        """Puts `new` [B, K, T, H] where `slots` says: what to keep, and what to attend to."""
        dtype = "int8" if isinstance(self.k, Quantized) else str(self.k.dtype)
        pairs = jax.tree.map(slots.extend, self, new.stored(dtype))
        kept, seen = jax.tree.transpose(jax.tree.structure(self), jax.tree.structure((0, 0)), pairs)
        return kept, seen


@flax.struct.dataclass
class LayerCache:
    """What one layer reads and writes while decoding."""

    self_attention: KeyValues
    cross_attention: KeyValues | None
    """Computed once from the encoder's output; None in a decoder-only model."""


@flax.struct.dataclass
class Lineage:
    """What tells beams apart that are the T tokens of one call: token t sees its ancestors only."""

    ancestors: jax.Array
    """int32 [B, T, L]: the column at which the ancestor at position `start + l` was read; of itself, its own."""
    start: jax.Array
    """int32 [B]: tokens before this position are seen by all."""

    def may_attend(self, keys: Tokens) -> jax.Array:
        """bool [B, 1, T, S] for keys [B, S]."""
        places = jnp.clip(keys.positions - self.start[:, None], 0, self.ancestors.shape[2] - 1)
        ancestors = jnp.take_along_axis(self.ancestors, places[:, None], axis=2)
        common = keys.positions < self.start[:, None]
        return (common[:, None] | (ancestors == keys.columns[:, None]))[:, None]


@flax.struct.dataclass
class DecoderCache:
    """Everything a decoder remembers of the tokens it has read.

    Positions count real tokens only, so that rows may be padded on the left.
    """

    layers: tuple[LayerCache, ...]
    slots: dict[str, Slots]
    """For each kind of layer, "full" and "window"."""
    memory_mask: jax.Array | None
    """bool [B, S]: the real tokens of the encoder's input."""
    lengths: jax.Array
    """int32 [B]: the position of the next token."""
    prefix: jax.Array | None = None
    """int32 [B]: so many first tokens of the row are seen by all its tokens; None: 0."""

    def admit(
        self, token_mask: jax.Array, *, side_by_side: bool = False
    ) -> tuple["DecoderCache", jax.Array, dict[str, Tokens]]:
        """Takes T new tokens, of which those in `token_mask` (bool [B, T]) are real.

        They follow each other, or stand `side_by_side` at one position.

        Returns:
            The cache with its bookkeeping moved on (keys and values are the layers' to write), the tokens' positions
            (int32 [B, T]; 0 for padding before the first token), and what each kind of layer may attend to.

        Raises:
            ConfigError: the tokens do not fit, where their number is known: outside of a compiled function.
        """
        if side_by_side:
            after, counts = jnp.zeros(token_mask.shape, jnp.int32), token_mask.any(axis=1).astype(jnp.int32)
        else:
            after, counts = jnp.cumsum(token_mask, axis=1, dtype=jnp.int32) - 1, token_mask.sum(axis=1, dtype=jnp.int32)
        positions = self.lengths[:, None] + after
        new = Tokens.of_call(jnp.where(token_mask, positions, EMPTY))
        admitted = {kind: slots.admit(new, side_by_side=side_by_side) for kind, slots in self.slots.items()}
        moved = dataclasses.replace(
            self, slots={kind: slots for kind, (slots, _) in admitted.items()}, lengths=self.lengths + counts
        )
        return moved, jnp.maximum(positions, 0), {kind: seen for kind, (_, seen) in admitted.items()}

    def forget(self, counts: jax.Array) -> "DecoderCache":
        """The cache without so many last tokens of each row, int32 [B].

        Where rows share their slots (`empty_cache`), it is one token, in the last column of a call.
        """
        slots = {kind: slots.forget(counts) for kind, slots in self.slots.items()}
        return dataclasses.replace(self, slots=slots, lengths=jnp.maximum(self.lengths - counts, 0))


def empty_cache(
    cfg: ModelConfig,
    batch: int,
    length: int,
    *,
    width: int = 1,
    dtype: str | None = None,
    cross_attention: Sequence[KeyValues] | None = None,
    memory_mask: jax.Array | None = None,
    prefix: jax.Array | None = None,
) -> DecoderCache:
    """A cache with room for `length` positions in each row, holding none.

    Args:
        width: tokens that stand side by side at one position.
        dtype: of what is stored, a floating dtype or `int8`; None: `cfg.dtype`.
        cross_attention: one entry a layer.
        prefix: int32 [B], see `DecoderCache`.
    """
    slots: dict[str, Slots] = {}
    for kind in set(cfg.layer_pattern):
        if kind == "window" and cfg.window is not None and cfg.window < length:
            slots[kind] = RingSlots.empty(batch, cfg.window, width)
        else:
            slots[kind] = DenseSlots.empty(batch, length * width)
    shapes = {kind: (batch, cfg.kv_heads, of.tokens.positions.shape[1], cfg.head_size) for kind, of in slots.items()}
    return _cache(cfg, slots, shapes, dtype, cross_attention, memory_mask, prefix)


def row_cache(cfg: ModelConfig, batch: int, length: int, *, dtype: str | None = None) -> DecoderCache:
    """A cache with room for `length` tokens in each row, which its rows fill at their own pace."""
    slots: dict[str, Slots] = {kind: RowSlots.empty(batch, length) for kind in set(cfg.layer_pattern)}
    shapes = dict.fromkeys(slots, (batch, cfg.kv_heads, length, cfg.head_size))
    return _cache(cfg, slots, shapes, dtype)


def paged_cache(
    cfg: ModelConfig, batch: int, *, pages: int, page_size: int, pages_a_row: int, dtype: str | None = None
) -> DecoderCache:
    """A cache whose rows share `pages` pages, each of `page_size` tokens; page 0 is nobody's."""
    slots: dict[str, Slots] = {
        kind: PagedSlots.unheld(batch, pages_a_row, page_size) for kind in set(cfg.layer_pattern)
    }
    shapes = dict.fromkeys(slots, (pages, cfg.kv_heads, page_size, cfg.head_size))
    return _cache(cfg, slots, shapes, dtype, prefix=jnp.zeros((batch,), jnp.int32) if cfg.prefix_lm else None)


def _cache(cfg, slots, shapes, dtype, cross_attention=None, memory_mask=None, prefix=None) -> DecoderCache:
    dtype = dtype or cfg.dtype

    def layer(number: int) -> LayerCache:
        room = jnp.zeros(shapes[cfg.layer_pattern[number % len(cfg.layer_pattern)]], cfg.dtype)
        cross = None if cross_attention is None else cross_attention[number].stored(dtype)
        return LayerCache(KeyValues(room, room).stored(dtype), cross)

    (batch, _) = next(iter(slots.values())).tokens.positions.shape
    layers = tuple(layer(number) for number in range(cfg.decoder_layers))
    return DecoderCache(layers, slots, memory_mask, jnp.zeros((batch,), jnp.int32), prefix)
