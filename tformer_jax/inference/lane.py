"""The compiled side of continuous batching: a fixed number of rows over one paged cache, taken and left one by one."""

import dataclasses
import functools
from typing import Any, cast

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
from tformer_jax.nn.kv_cache import DecoderCache, LayerCache, paged_cache
from tformer_jax.nn.slots import EMPTY, PagedSlots, Tokens
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


@functools.partial(jax.jit, static_argnames=("plan", "source_length"))
def empty(plan: Plan, source_length: int) -> State:
    """A lane in which nothing runs; encoders may read so many tokens."""
    cfg, R = plan.model.cfg, plan.rows
    cache = _paged(plan)
    if cfg.family == "seq2seq":
        room = jnp.zeros((R, cfg.kv_heads, source_length, cfg.head_size), cfg.dtype)
        cross = type(cache.layers[0].self_attention)(room, room).stored(plan.decode.cache_dtype or cfg.dtype)
        layers = tuple(dataclasses.replace(layer, cross_attention=cross) for layer in cache.layers)
        cache = dataclasses.replace(cache, layers=layers, memory_mask=jnp.zeros((R, source_length), bool))
    nothing = jnp.zeros((R,), jnp.int32)
    prompts = jnp.full((R, plan.length), PAD)
    seeds = jnp.zeros((R, 2), jnp.uint32)
    return State(cache, _start(plan, prompts, nothing, seeds, RowSettings.of(plan.decode, R)))


@functools.partial(jax.jit, static_argnames=("source_length",), donate_argnames=("state",))
def widen(state: State, source_length: int) -> State:
    """The same with room for longer sources."""
    cache = state.cache
    assert cache.memory_mask is not None
    missing = source_length - cache.memory_mask.shape[1]
    layers = tuple(
        dataclasses.replace(
            layer,
            cross_attention=jax.tree.map(
                lambda kept: jnp.pad(kept, ((0, 0), (0, 0), (0, missing), (0, 0))), layer.cross_attention
            ),
        )
        for layer in cache.layers
    )
    mask = jnp.pad(cache.memory_mask, ((0, 0), (0, missing)))
    return State(dataclasses.replace(cache, layers=layers, memory_mask=mask), state.rows)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def admit(plan: Plan, params: Any, state: State, new: Newcomers) -> State:
    """Gives rows to newcomers; an encoder reads their sources. Their prompts are read afterwards."""
    cache, places = state.cache, new.places
    positions = jnp.arange(plan.pages_a_row * plan.page_size)
    held = jnp.where(positions < new.filled[:, None], positions, EMPTY)
    fresh = PagedSlots(
        Tokens(held, jnp.zeros_like(held)), new.tables, new.filled, jnp.zeros((len(places), 0), jnp.int32)
    )
    counts = (new.prompts != PAD).sum(axis=1, dtype=jnp.int32)
    cache = dataclasses.replace(
        cache,
        slots={kind: _put(slots, places, fresh) for kind, slots in cache.slots.items()},
        lengths=_put(cache.lengths, places, new.filled),
        prefix=None if cache.prefix is None else _put(cache.prefix, places, counts),
    )
    if new.sources is not None:
        cache = _with_sources(plan, params, cache, places, new.sources)
    begun = _start(plan, new.prompts, new.room, new.seeds, new.settings)
    return State(cache, _put(state.rows, places, begun))


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def read(plan: Plan, params: Any, state: State, places: jax.Array, tokens: jax.Array) -> State:
    """Rows `places` (int32 [P]) read more of their prompts: int32 [P, T], PAD on the left; see `read_prompt`."""
    own = read_prompt(plan.model, {"params": params}, tokens, _of_rows(state.cache, places))
    return State(_with_rows(state.cache, places, own), state.rows)


@functools.partial(jax.jit, donate_argnames=("state",))
def fork(
    state: State, source: jax.Array, to: jax.Array, seeds: jax.Array, table: jax.Array, copies: jax.Array
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

    def layer(kept: LayerCache) -> LayerCache:
        pools = jax.tree.map(lambda pool: pool.at[copies[:, 1]].set(pool[copies[:, 0]]), kept.self_attention)
        return LayerCache(pools, jax.tree.map(twin, kept.cross_attention))

    cache = state.cache
    cache = dataclasses.replace(
        jax.tree.map(twin, dataclasses.replace(cache, layers=())), layers=tuple(layer(kept) for kept in cache.layers)
    )
    slots = {
        kind: dataclasses.replace(of, table=of.table.at[to].set(table)) for kind, of in _paged_slots(cache).items()
    }
    rows = jax.tree.map(twin, state.rows)
    assert isinstance(rows, Chains), "the outputs of beam search share one row"
    rows = dataclasses.replace(rows, keys=rows.keys.at[to].set(_keys(seeds[None])[0]))
    return State(dataclasses.replace(cache, slots=slots), rows)


@functools.partial(jax.jit, static_argnames=("plan", "pages"), donate_argnames=("state",))
def step(plan: Plan, params: Any, state: State, ended: jax.Array, *, pages: int) -> tuple[State, Report]:
    """One more token in every row that runs.

    Args:
        ended: bool [R], rows that are to end.
        pages: what the longest row needs; others need not be read.

    Returns:
        The state, and what came of it.
    """
    rows = state.rows.ended(ended)
    tokens, lineage = rows.reading()
    shorter = _of_rows(state.cache, ALL, pages)
    logits, shorter = reader(plan.model, {"params": params})(tokens, shorter, lineage)
    rows = rows.advance(logits)
    return State(_with_rows(state.cache, ALL, shorter), rows), rows.report()


def _paged(plan: Plan) -> DecoderCache:
    return paged_cache(
        plan.model.cfg,
        plan.rows,
        pages=plan.pages,
        page_size=plan.page_size,
        pages_a_row=plan.pages_a_row,
        dtype=plan.decode.cache_dtype,
    )


def _paged_slots(cache: DecoderCache) -> dict[str, PagedSlots]:
    return cast(dict[str, PagedSlots], cache.slots)


def _start(plan: Plan, prompts: jax.Array, room: jax.Array, seeds: jax.Array, settings: RowSettings) -> Rows:
    length = plan.length
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

    def of(slots: PagedSlots) -> PagedSlots:
        table = slots.table[places, :pages]
        size = slots.tokens.positions.shape[1] // slots.table.shape[1]
        tokens = jax.tree.map(lambda leaf: leaf[places, : table.shape[1] * size], slots.tokens)
        return PagedSlots(tokens, table, slots.index[places], slots.added[places])

    def take(leaf: jax.Array) -> jax.Array:
        return leaf[places]

    return dataclasses.replace(
        cache,
        layers=tuple(
            LayerCache(layer.self_attention, jax.tree.map(take, layer.cross_attention)) for layer in cache.layers
        ),
        slots={kind: of(slots) for kind, slots in _paged_slots(cache).items()},
        memory_mask=jax.tree.map(take, cache.memory_mask),
        lengths=cache.lengths[places],
        prefix=jax.tree.map(take, cache.prefix),
    )


def _with_rows(cache: DecoderCache, places: Places, own: DecoderCache) -> DecoderCache:
    """The cache after some of its rows, as `_of_rows` gave them, have read."""

    def put(slots: PagedSlots, part: PagedSlots) -> PagedSlots:
        width = part.tokens.positions.shape[1]
        tokens = jax.tree.map(
            lambda all, some: all.at[places, :width].set(some, mode="drop"), slots.tokens, part.tokens
        )
        table = slots.table.at[places, : part.table.shape[1]].set(part.table, mode="drop")
        return PagedSlots(tokens, table, _put(slots.index, places, part.index), slots.added)

    return dataclasses.replace(
        cache,
        layers=tuple(
            LayerCache(read.self_attention, layer.cross_attention)
            for layer, read in zip(cache.layers, own.layers, strict=True)
        ),
        slots={kind: put(slots, _paged_slots(own)[kind]) for kind, slots in _paged_slots(cache).items()},
        lengths=_put(cache.lengths, places, own.lengths),
    )


def _put(all_rows: Any, places: Places, some: Any) -> Any:
    """Every array of `all_rows` [R, ...] with the rows of `some` [P, ...] at `places`; places beyond R are left out."""
    return jax.tree.map(lambda whole, part: whole.at[places].set(part, mode="drop"), all_rows, some)
