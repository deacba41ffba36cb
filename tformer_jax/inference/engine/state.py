"""State of a lane on the device, and functions that read and update some of its rows."""

import dataclasses
from typing import Any, NamedTuple, cast

import flax
import jax

from tformer_jax import axes
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import BeamState
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.decoding_state import DecodingState
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.inference.sampling_state import SamplingState
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.kv_cache import DecoderCache, LayerCache, LayerState, RowState
from tformer_jax.nn.sharding import constrain
from tformer_jax.nn.slots import PagedSlots, RowSlots

Indices = jax.Array | slice
ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static configuration that a lane is compiled for."""

    model: Seq2Seq | DecoderLM
    """With unrolled layers."""
    decode: DecodeConfig
    constraints: Constraints
    rows: int
    pages: int
    page_size: int
    paged: bool
    """Whether rows share a pool of pages; otherwise the cache is dense, with contiguous slots for each row."""

    @property
    def length(self) -> int:
        """Maximum number of tokens per row, including the first input of a translation's decoder."""
        return self.model.cfg.max_length + 1

    @property
    def longest_input(self) -> int:
        """Maximum number of tokens of a source or prompt."""
        return self.model.cfg.max_length

    @property
    def history(self) -> int:
        """Number of tokens per row that are kept for the constraints."""
        return self.length if self.constraints.need_history else 0

    @property
    def pages_per_row(self) -> int:
        """Maximum number of pages per row."""
        return -(-self.length * self.decode.width // self.page_size)


@flax.struct.dataclass
class State:
    """All arrays of a lane on the device."""

    cache: DecoderCache
    rows: DecodingState


@flax.struct.dataclass
class NewRows:
    """P rows to start; padding entries have the index `Plan.rows`."""

    indices: jax.Array
    """int32 [P]: indices of the rows in the lane."""
    last: jax.Array
    """int32 [P]: last token of each prompt."""
    counts: jax.Array
    """int32 [P]: number of tokens of each prompt."""
    history: jax.Array
    """int32 [P, L]: prompts, then PAD; L is 0 unless the constraints need earlier tokens."""
    max_new_tokens: jax.Array
    """int32 [P]: maximum number of tokens to generate."""
    seeds: jax.Array
    """uint32 [P, 2]: random seed, and the number that is folded into it."""
    scored: jax.Array
    """bool [P]: whether token log-probabilities are summed."""
    tables: jax.Array
    """int32 [P, pages per row]: page tables."""
    filled: jax.Array
    """int32 [P]: number of prompt tokens that are already in the row's pages."""
    settings: RowSettings
    sources: jax.Array | None
    """int32 [P, S]: encoder inputs, PAD on the right; None without an encoder."""


class Size(NamedTuple):
    """Lengths of arrays that grow on demand."""

    source: int
    """Maximum number of source tokens."""
    output: int
    """Maximum number of generated tokens."""
    positions: int
    """Positions of the cache, each with a slot for every beam; smaller than `output` for long beam search.

    A dense cache has this size; a paged one is compacted when its tokens after the prompt exceed it.
    """


def constrain_state(plan: Plan, state: State) -> State:
    """Constrains the state to be sharded over the mesh by rows, and by key/value heads, if they divide evenly."""

    def rows(tree: Any) -> Any:
        return jax.tree.map(lambda x: constrain(x, axes.BATCH, *[None] * (x.ndim - 1)), tree)

    def heads(first: str | None, tree: Any) -> Any:
        return jax.tree.map(lambda x: constrain(x, first, axes.KV_HEADS, None, None), tree)

    def own(kept: LayerState) -> Any:
        if isinstance(kept, RowState):
            return jax.tree.map(lambda x: constrain(x, axes.BATCH, None, axes.HEADS, *[None] * (x.ndim - 3)), kept)
        return heads(None if plan.paged else axes.BATCH, kept)

    layers = tuple(
        LayerCache(own(layer.self_attention), heads(axes.BATCH, layer.cross_attention)) for layer in state.cache.layers
    )
    other = rows(dataclasses.replace(state.cache, layers=()))
    return State(dataclasses.replace(other, layers=layers), rows(state.rows))


def dense_slots(plan: Plan, size: Size) -> int:
    """Returns the number of slots per row of a dense cache, for BOS and all tokens of an output but the last.

    Beam search compacts a paged cache that has more slots in use after the prompt.
    """
    return size.positions * plan.decode.width


def row_slots(cache: DecoderCache) -> dict[str, RowSlots]:
    """Returns the slot layouts of a lane's cache, in which rows differ in length."""
    return cast(dict[str, RowSlots], cache.slots)


def initial_rows(plan: Plan, new: NewRows, length: int) -> DecodingState:
    """Returns the initial state of rows; `length` is the size of the token arrays of beam search."""
    if plan.decode.strategy == "beam":
        sizes: Any = {"length": length, "cfg": plan.decode}
        return BeamState.start(
            new.last, new.counts, new.max_new_tokens, new.settings, plan.constraints, **sizes, history=new.history
        )
    options: Any = {"history": new.history, "scored": new.scored}
    return SamplingState.start(
        new.last, new.counts, new.max_new_tokens, prng_keys(new.seeds), new.settings, plan.constraints, **options
    )


def prng_keys(seeds: jax.Array) -> jax.Array:
    """Returns PRNG keys [P] for seeds, uint32 [P, 2]."""
    return jax.vmap(lambda pair: jax.random.fold_in(jax.random.key(pair[0]), pair[1]))(seeds)


def select_rows(cache: DecoderCache, indices: Indices, pages: int | None = None) -> DecoderCache:
    """Returns the cache of some rows, limited to their first `pages` pages of the pool."""

    def of(slots: RowSlots) -> RowSlots:
        if not isinstance(slots, PagedSlots):
            return slots
        table = slots.table[indices, :pages]
        size = slots.tokens.positions.shape[1] // slots.table.shape[1]
        tokens = jax.tree.map(lambda leaf: leaf[indices, : table.shape[1] * size], slots.tokens)
        return PagedSlots(tokens, slots.index[indices], slots.added[indices], table)

    def take(leaf: jax.Array) -> jax.Array:
        return leaf[indices]

    def own(kept: LayerState) -> LayerState:
        return jax.tree.map(take, kept) if isinstance(kept, RowState) else kept

    return dataclasses.replace(
        cache,
        layers=tuple(
            LayerCache(own(layer.self_attention), jax.tree.map(take, layer.cross_attention)) for layer in cache.layers
        ),
        slots={kind: of(slots) for kind, slots in row_slots(cache).items()},
        memory_padding_mask=jax.tree.map(take, cache.memory_padding_mask),
        lengths=cache.lengths[indices],
        prefix=jax.tree.map(take, cache.prefix),
    )


def update_rows(cache: DecoderCache, indices: Indices, own: DecoderCache) -> DecoderCache:
    """Replaces the rows `indices` of the cache by `own`, a result of `select_rows` that has read more tokens."""

    def merged(slots: RowSlots, part: RowSlots) -> RowSlots:
        if not isinstance(slots, PagedSlots):
            return part
        width = part.tokens.positions.shape[1]
        tokens = jax.tree.map(
            lambda all, some: all.at[indices, :width].set(some, mode="drop"), slots.tokens, part.tokens
        )
        return PagedSlots(tokens, set_rows(slots.index, indices, part.index), slots.added, slots.table)

    def updated(kept: LayerState, read: LayerState) -> LayerState:
        return set_rows(kept, indices, read) if isinstance(kept, RowState) else read

    return dataclasses.replace(
        cache,
        layers=tuple(
            LayerCache(updated(layer.self_attention, read.self_attention), layer.cross_attention)
            for layer, read in zip(cache.layers, own.layers, strict=True)
        ),
        slots={kind: merged(slots, row_slots(own)[kind]) for kind, slots in row_slots(cache).items()},
        lengths=set_rows(cache.lengths, indices, own.lengths),
    )


def set_rows(all_rows: Any, indices: Indices, some: Any) -> Any:
    """Sets the rows `indices` of all arrays, [R, ...], to `some`, [P, ...]; ignores indices of at least R."""
    return jax.tree.map(lambda array, part: array.at[indices].set(part, mode="drop"), all_rows, some)
