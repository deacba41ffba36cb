"""What a lane keeps on the device, and how some of its rows are taken out and put back."""

import dataclasses
from typing import Any, NamedTuple, cast

import flax
import jax

from tformer_jax import axes
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import Beams
from tformer_jax.inference.chains import Chains
from tformer_jax.inference.constraints import Rules
from tformer_jax.inference.rows import Rows
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.kv_cache import DecoderCache, LayerCache
from tformer_jax.nn.sharding import constrain
from tformer_jax.nn.slots import PagedSlots, RowSlots

Places = jax.Array | slice
ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a lane is compiled for."""

    model: Seq2Seq | DecoderLM
    """Its layers are a loop."""
    decode: DecodeConfig
    rules: Rules
    rows: int
    pages: int
    page_size: int
    paged: bool
    """Whether rows share a pool of pages; otherwise each has its slots in one piece."""

    @property
    def length(self) -> int:
        """The most tokens of one row: what starts a translation, too."""
        return self.model.cfg.max_length + 1

    @property
    def history(self) -> int:
        """Tokens that are kept of each row for its rules."""
        return self.length if self.decode.strategy != "beam" and self.rules.need_history else 0

    @property
    def pages_a_row(self) -> int:
        """The most pages of one row."""
        return -(-self.length * self.decode.width // self.page_size)


@flax.struct.dataclass
class State:
    """Everything on the device."""

    cache: DecoderCache
    rows: Rows


@flax.struct.dataclass
class Newcomers:
    """P rows that begin; those that only fill up the call have the place `rows`."""

    places: jax.Array
    """int32 [P]: the rows of the lane that they take."""
    last: jax.Array
    """int32 [P]: the last token of each prompt."""
    counts: jax.Array
    """int32 [P]: tokens of each prompt."""
    history: jax.Array
    """int32 [P, L]: the prompts, then PAD; L is 0 unless the rules look at earlier tokens."""
    room: jax.Array
    """int32 [P]: the most tokens that are chosen."""
    seeds: jax.Array
    """uint32 [P, 2]: of sampling, and what is folded into it."""
    scored: jax.Array
    """bool [P]: rows whose chosen tokens' log-probabilities are summed."""
    tables: jax.Array
    """int32 [P, pages of a row]."""
    filled: jax.Array
    """int32 [P]: prompt tokens that their pages hold already."""
    settings: RowSettings
    sources: jax.Array | None
    """int32 [P, S] for an encoder, PAD on the right."""


class Size(NamedTuple):
    """Lengths of arrays, which grow when they have to."""

    source: int
    """Tokens that an encoder reads."""
    output: int
    """Tokens that are chosen."""


def placed(plan: Plan, state: State) -> State:
    """The state with its rows split over the mesh, and heads of keys and values, as far as that is even."""

    def rows(tree: Any) -> Any:
        return jax.tree.map(lambda x: constrain(x, axes.BATCH, *[None] * (x.ndim - 1)), tree)

    def heads(first: str | None, tree: Any) -> Any:
        return jax.tree.map(lambda x: constrain(x, first, axes.KV_HEADS, None, None), tree)

    own = None if plan.paged else axes.BATCH
    layers = tuple(
        LayerCache(heads(own, layer.self_attention), heads(axes.BATCH, layer.cross_attention))
        for layer in state.cache.layers
    )
    rest = rows(dataclasses.replace(state.cache, layers=()))
    return State(dataclasses.replace(rest, layers=layers), rows(state.rows))


def slots_in_one_piece(plan: Plan, size: Size) -> int:
    """Slots of a row in one piece: a translation starts with one token."""
    return (1 + size.output) * plan.decode.width


def row_slots(cache: DecoderCache) -> dict[str, RowSlots]:
    """The slots of a lane's cache, where every row goes at its own pace."""
    return cast(dict[str, RowSlots], cache.slots)


def start(plan: Plan, new: Newcomers, length: int) -> Rows:
    """Rows that have chosen nothing yet; `length` is the room for outputs of beam search."""
    if plan.decode.strategy == "beam":
        return Beams.start(new.last, new.counts, new.room, new.settings, plan.rules, length=length, cfg=plan.decode)
    options: Any = {"history": new.history, "scored": new.scored}
    return Chains.start(new.last, new.counts, new.room, keys_of(new.seeds), new.settings, plan.rules, **options)


def keys_of(seeds: jax.Array) -> jax.Array:
    """uint32 [P, 2] -> [P] PRNG keys."""
    return jax.vmap(lambda pair: jax.random.fold_in(jax.random.key(pair[0]), pair[1]))(seeds)


def of_rows(cache: DecoderCache, places: Places, pages: int | None = None) -> DecoderCache:
    """A cache of some rows over the same pool, and of their first `pages` pages only."""

    def of(slots: RowSlots) -> RowSlots:
        if not isinstance(slots, PagedSlots):
            return slots
        table = slots.table[places, :pages]
        size = slots.tokens.positions.shape[1] // slots.table.shape[1]
        tokens = jax.tree.map(lambda leaf: leaf[places, : table.shape[1] * size], slots.tokens)
        return PagedSlots(tokens, slots.index[places], slots.added[places], table)

    def take(leaf: jax.Array) -> jax.Array:
        return leaf[places]

    return dataclasses.replace(
        cache,
        layers=tuple(
            LayerCache(layer.self_attention, jax.tree.map(take, layer.cross_attention)) for layer in cache.layers
        ),
        slots={kind: of(slots) for kind, slots in row_slots(cache).items()},
        memory_mask=jax.tree.map(take, cache.memory_mask),
        lengths=cache.lengths[places],
        prefix=jax.tree.map(take, cache.prefix),
    )


def with_rows(cache: DecoderCache, places: Places, own: DecoderCache) -> DecoderCache:
    """The cache after some of its rows, as `of_rows` gave them, have read."""

    def together(slots: RowSlots, part: RowSlots) -> RowSlots:
        if not isinstance(slots, PagedSlots):
            return part
        width = part.tokens.positions.shape[1]
        tokens = jax.tree.map(
            lambda all, some: all.at[places, :width].set(some, mode="drop"), slots.tokens, part.tokens
        )
        return PagedSlots(tokens, put(slots.index, places, part.index), slots.added, slots.table)

    return dataclasses.replace(
        cache,
        layers=tuple(
            LayerCache(read.self_attention, layer.cross_attention)
            for layer, read in zip(cache.layers, own.layers, strict=True)
        ),
        slots={kind: together(slots, row_slots(own)[kind]) for kind, slots in row_slots(cache).items()},
        lengths=put(cache.lengths, places, own.lengths),
    )


def put(all_rows: Any, places: Places, some: Any) -> Any:
    """Every array of `all_rows` [R, ...] with the rows of `some` [P, ...] at `places`; places beyond R are left out."""
    return jax.tree.map(lambda whole, part: whole.at[places].set(part, mode="drop"), all_rows, some)
