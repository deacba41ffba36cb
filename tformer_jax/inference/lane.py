"""The compiled side of continuous batching: a fixed number of rows over one paged cache, taken and left one by one."""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import Beams
from tformer_jax.inference.chains import Chains
from tformer_jax.inference.constraints import Rules
from tformer_jax.inference.generate import read_prompt, reader
from tformer_jax.inference.rows import Report, Rows
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.kv_cache import DecoderCache, KeyValues, LayerCache, paged_cache, row_cache
from tformer_jax.nn.slots import EMPTY, PagedSlots, RowSlots, Tokens
from tformer_jax.special_tokens import PAD

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
    prompts: jax.Array
    """int32 [P, L]: all tokens before the first choice, PAD on the left."""
    room: jax.Array
    """int32 [P]: the most tokens that are chosen."""
    seeds: jax.Array
    """uint32 [P, 2]: of sampling, and what is folded into it."""
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


@functools.partial(jax.jit, static_argnames=("plan", "size"))
def empty(plan: Plan, size: Size) -> State:
    """A lane in which nothing runs."""
    cfg, R, dtype = plan.model.cfg, plan.rows, plan.decode.cache_dtype
    if plan.paged:
        pages = {"pages": plan.pages, "page_size": plan.page_size, "pages_a_row": plan.pages_a_row}
        cache = paged_cache(cfg, R, **pages, dtype=dtype)
    else:
        cache = row_cache(cfg, R, _slots(plan, size), dtype=dtype)
    if cfg.family == "seq2seq":
        room = jnp.zeros((R, cfg.kv_heads, size.source, cfg.head_size), cfg.dtype)
        cross = KeyValues(room, room).stored(dtype or cfg.dtype)
        layers = tuple(LayerCache(layer.self_attention, cross) for layer in cache.layers)
        cache = dataclasses.replace(cache, layers=layers, memory_mask=jnp.zeros((R, size.source), bool))
    nothing, prompts = jnp.zeros((R,), jnp.int32), jnp.full((R, plan.length), PAD)
    settings = RowSettings.of(plan.decode, R)
    return State(cache, _start(plan, prompts, nothing, jnp.zeros((R, 2), jnp.uint32), settings, size.output))


@functools.partial(jax.jit, static_argnames=("plan", "size"))
def widen(plan: Plan, state: State, size: Size) -> State:
    """The same with longer arrays."""
    cache = state.cache

    def pad(kept: jax.Array, length: int, axis: int, value: int = 0) -> jax.Array:
        widths = [(0, 0)] * kept.ndim
        widths[axis] = (0, length - kept.shape[axis])
        return jnp.pad(kept, widths, constant_values=value)

    def layer(kept: LayerCache) -> LayerCache:
        cross = jax.tree.map(lambda leaf: pad(leaf, size.source, 2), kept.cross_attention)
        if plan.paged:
            return LayerCache(kept.self_attention, cross)
        return LayerCache(jax.tree.map(lambda leaf: pad(leaf, _slots(plan, size), 2), kept.self_attention), cross)

    def row_slots(slots: RowSlots) -> RowSlots:
        positions = pad(slots.tokens.positions, _slots(plan, size), 1, EMPTY)
        columns = pad(slots.tokens.columns, _slots(plan, size), 1)
        return dataclasses.replace(slots, tokens=Tokens(positions, columns))

    slots = _row_slots(cache)
    cache = dataclasses.replace(
        cache,
        layers=tuple(layer(kept) for kept in cache.layers),
        slots=dict(slots) if plan.paged else {kind: row_slots(of) for kind, of in slots.items()},
        memory_mask=jax.tree.map(lambda mask: pad(mask, size.source, 1), cache.memory_mask),
    )
    return State(cache, state.rows.widened(size.output))


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def admit(plan: Plan, params: Any, state: State, new: Newcomers) -> State:
    """Gives rows to newcomers; an encoder reads their sources. Their prompts are read afterwards."""
    cache, places = state.cache, new.places
    slots = _row_slots(cache)
    positions = jnp.arange(next(iter(slots.values())).tokens.positions.shape[1])
    held = jnp.where(positions < new.filled[:, None], positions, EMPTY)
    fresh = RowSlots(Tokens(held, jnp.zeros_like(held)), new.filled, jnp.zeros((len(places), 0), jnp.int32))
    if plan.paged:
        fresh = PagedSlots(fresh.tokens, fresh.index, fresh.added, new.tables)
    counts = (new.prompts != PAD).sum(axis=1, dtype=jnp.int32)
    cache = dataclasses.replace(
        cache,
        slots={kind: _put(of, places, fresh) for kind, of in slots.items()},
        lengths=_put(cache.lengths, places, new.filled),
        prefix=None if cache.prefix is None else _put(cache.prefix, places, counts),
    )
    if new.sources is not None:
        cache = _with_sources(plan, params, cache, places, new.sources)
    begun = _start(plan, new.prompts, new.room, new.seeds, new.settings, state.rows.length)
    return State(cache, _put(state.rows, places, begun))


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def read(plan: Plan, params: Any, state: State, places: jax.Array, tokens: jax.Array) -> State:
    """Rows `places` (int32 [P]) read more of their prompts: int32 [P, T], PAD on the left; see `read_prompt`."""
    own = read_prompt(plan.model, {"params": params}, tokens, _of_rows(state.cache, places))
    return State(_with_rows(state.cache, places, own), state.rows)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def fork(
    plan: Plan, state: State, source: jax.Array, to: jax.Array, seeds: jax.Array, table: jax.Array, copies: jax.Array
) -> State:
    """Row `to` goes on from what row `source` has read, with other random numbers.

    Args:
        source, to: int32 scalars.
        seeds: uint32 [2], as in `Newcomers`.
        table: int32 [pages of a row], the new row's.
        copies: int32 [n, 2]: pages to copy, from and to; 0 and 0 copies nothing.
    """

    def twin(leaf: jax.Array) -> jax.Array:
        return leaf.at[to].set(leaf[source])

    def copied(pool: jax.Array) -> jax.Array:
        return pool.at[copies[:, 1]].set(pool[copies[:, 0]])

    def layer(kept: LayerCache) -> LayerCache:
        return LayerCache(
            jax.tree.map(copied if plan.paged else twin, kept.self_attention), jax.tree.map(twin, kept.cross_attention)
        )

    cache = state.cache
    cache = dataclasses.replace(
        jax.tree.map(twin, dataclasses.replace(cache, layers=())), layers=tuple(layer(kept) for kept in cache.layers)
    )
    slots = {
        kind: dataclasses.replace(of, table=of.table.at[to].set(table)) if isinstance(of, PagedSlots) else of
        for kind, of in _row_slots(cache).items()
    }
    rows = jax.tree.map(twin, state.rows)
    assert isinstance(rows, Chains), "the outputs of beam search share one row"
    rows = dataclasses.replace(rows, keys=rows.keys.at[to].set(_keys(seeds[None])[0]))
    return State(dataclasses.replace(cache, slots=slots), rows)


@functools.partial(jax.jit, static_argnames=("plan", "pages"), donate_argnames=("state",))
def step(plan: Plan, params: Any, state: State, ended: jax.Array, *, pages: int | None) -> tuple[State, Report]:
    """One more token in every row that runs.

    Args:
        ended: bool [R], rows that are to end.
        pages: what the longest row needs, where there are pages; others need not be read.

    Returns:
        The state, and what came of it.
    """
    rows = state.rows.ended(ended)
    tokens, lineage = rows.reading()
    shorter = _of_rows(state.cache, ALL, pages)
    logits, shorter = reader(plan.model, {"params": params})(tokens, shorter, lineage)
    rows = rows.advance(logits)
    return State(_with_rows(state.cache, ALL, shorter), rows), rows.report()


def _slots(plan: Plan, size: Size) -> int:
    """Slots of a row in one piece: a translation starts with one token."""
    return (1 + size.output) * plan.decode.width


def _row_slots(cache: DecoderCache) -> dict[str, RowSlots]:
    return cast(dict[str, RowSlots], cache.slots)


def _start(
    plan: Plan, prompts: jax.Array, room: jax.Array, seeds: jax.Array, settings: RowSettings, length: int
) -> Rows:
    if plan.decode.strategy == "beam":
        return Beams.start(prompts, room, settings, plan.rules, length=length, cfg=plan.decode)
    return Chains.start(prompts, room, _keys(seeds), settings, plan.rules, length=0, scored=True)


def _keys(seeds: jax.Array) -> jax.Array:
    """uint32 [P, 2] -> [P] PRNG keys."""
    return jax.vmap(lambda pair: jax.random.fold_in(jax.random.key(pair[0]), pair[1]))(seeds)


def _with_sources(plan: Plan, params: Any, cache: DecoderCache, places: jax.Array, sources: jax.Array) -> DecoderCache:
    assert cache.memory_mask is not None
    variables, real = {"params": params}, sources != PAD
    memory = plan.model.apply(variables, sources, real, method="encode")
    own: Any = plan.model.apply(variables, memory, real, 1, dtype=plan.decode.cache_dtype, method="init_cache")
    missing = cache.memory_mask.shape[1] - sources.shape[1]

    def put(kept: jax.Array, new: jax.Array) -> jax.Array:
        return kept.at[places].set(jnp.pad(new, ((0, 0), (0, 0), (0, missing), (0, 0))), mode="drop")

    layers = tuple(
        LayerCache(layer.self_attention, jax.tree.map(put, layer.cross_attention, read.cross_attention))
        for layer, read in zip(cache.layers, own.layers, strict=True)
    )
    mask = _put(cache.memory_mask, places, jnp.pad(real, ((0, 0), (0, missing))))
    return dataclasses.replace(cache, layers=layers, memory_mask=mask)


def _of_rows(cache: DecoderCache, places: Places, pages: int | None = None) -> DecoderCache:
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
        slots={kind: of(slots) for kind, slots in _row_slots(cache).items()},
        memory_mask=jax.tree.map(take, cache.memory_mask),
        lengths=cache.lengths[places],
        prefix=jax.tree.map(take, cache.prefix),
    )


def _with_rows(cache: DecoderCache, places: Places, own: DecoderCache) -> DecoderCache:
    """The cache after some of its rows, as `_of_rows` gave them, have read."""

    def put(slots: RowSlots, part: RowSlots) -> RowSlots:
        if not isinstance(slots, PagedSlots):
            return dataclasses.replace(part, added=slots.added)
        width = part.tokens.positions.shape[1]
        tokens = jax.tree.map(
            lambda all, some: all.at[places, :width].set(some, mode="drop"), slots.tokens, part.tokens
        )
        return PagedSlots(tokens, _put(slots.index, places, part.index), slots.added, slots.table)

    return dataclasses.replace(
        cache,
        layers=tuple(
            LayerCache(read.self_attention, layer.cross_attention)
            for layer, read in zip(cache.layers, own.layers, strict=True)
        ),
        slots={kind: put(slots, _row_slots(own)[kind]) for kind, slots in _row_slots(cache).items()},
        lengths=_put(cache.lengths, places, own.lengths),
    )


def _put(all_rows: Any, places: Places, some: Any) -> Any:
    """Every array of `all_rows` [R, ...] with the rows of `some` [P, ...] at `places`; places beyond R are left out."""
    return jax.tree.map(lambda whole, part: whole.at[places].set(part, mode="drop"), all_rows, some)
