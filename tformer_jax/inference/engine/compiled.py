"""Compiled functions of continuous batching, for a fixed number of rows that share a cache."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer_jax.config import ModelConfig
from tformer_jax.inference.beam import BeamState, Hypotheses
from tformer_jax.inference.decoding_state import DecodingState, StepResult
from tformer_jax.inference.engine.state import (
    NewRows,
    Plan,
    Size,
    State,
    constrain_state,
    initial_rows,
    phrase_arrays,
)
from tformer_jax.inference.forced import FirstTokens, ForcedTokens
from tformer_jax.inference.lookup import skip_drafts
from tformer_jax.inference.model_step import prefill, step_fn
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.models.ensemble import joined_caches, member_configs
from tformer_jax.nn.decoder_cache import DecoderCache, empty_entries, paged_cache, row_cache
from tformer_jax.nn.kv_cache import LayerCache
from tformer_jax.nn.row_slots import ALL, set_rows
from tformer_jax.nn.sharding import replicate
from tformer_jax.special_tokens import PAD

MAX_STEPS = 32
"""Maximum number of steps per call of `advance`."""

Carry = tuple[StepResult, jax.Array, DecodingState, DecoderCache]
"""What a step gets and returns: all results, the number of steps, the rows and their cache."""


class Steps(NamedTuple):
    """Results of the steps of one call."""

    results: StepResult
    """Results of all steps: arrays [MAX_STEPS, B, ...]; entries from index `taken` on are unspecified."""
    taken: jax.Array
    """int32 scalar: number of steps."""
    filled: jax.Array
    """int32 [B]: number of slots of each row up to the last one in use."""


@functools.partial(jax.jit, static_argnames=("plan", "size"))
def empty_state(plan: Plan, size: Size) -> State:
    """Returns the initial state of a lane, without running rows."""
    cache = joined_caches([_empty_cache(cfg, plan, size) for cfg in member_configs(plan.model)])
    B = plan.rows
    zeros = jnp.zeros((B,), jnp.int32)
    unused_rows = NewRows(
        indices=zeros,
        last=zeros,
        counts=zeros,
        history=jnp.full((B, plan.history), PAD),
        max_new_tokens=zeros,
        seeds=jnp.zeros((B, 2), jnp.uint32),
        scored=zeros > 0,
        tables=zeros[:, None],
        filled=zeros,
        settings=RowSettings.from_config(plan.decode, B),
        forced=ForcedTokens.from_rows([FirstTokens()] * B, size.forced),
        phrases=phrase_arrays(plan, [()] * B),
        sources=None,
    )
    return constrain_state(plan, State(cache, initial_rows(plan, unused_rows, size.output)))


def _empty_cache(cfg: ModelConfig, plan: Plan, size: Size) -> DecoderCache:
    B, width, dtype = plan.rows, plan.decode.width, plan.decode.cache_dtype
    if plan.paged:
        pages = {"pages": plan.pages, "page_size": plan.page_size, "pages_per_row": plan.pages_per_row}
        cache = paged_cache(cfg, B, **pages, width=width, dtype=dtype)
    else:
        cache = row_cache(cfg, B, size.slots, width=width, dtype=dtype)
    if not cfg.model_class.reads_source:
        return cache
    cross = empty_entries(cfg, cfg.attention, B, size.source).stored(dtype or cfg.dtype)
    layers = tuple(LayerCache(layer.self_attention, cross) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers, memory_padding_mask=jnp.zeros((B, size.source), bool))


@functools.partial(jax.jit, static_argnames=("plan", "size"))
def resize(plan: Plan, state: State, size: Size) -> State:
    """Pads or cuts the arrays of a state to the lengths `size`, which must hold all running rows."""
    cache = state.cache.resize(size.slots, size.source)
    return constrain_state(plan, State(cache, state.rows.resized(size.output, size.forced)))


@functools.partial(jax.jit, static_argnames=("plan",))
def enlarge(plan: Plan, state: State) -> State:
    """Pads the pools of pages to `plan.pages` pages."""
    return constrain_state(plan, State(state.cache.add_pages(plan.pages), state.rows))


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def set_tables(plan: Plan, state: State, indices: jax.Array, tables: jax.Array) -> State:
    """Sets the page tables of rows `indices`, int32 [P], to `tables`, int32 [P, pages per row]."""
    return constrain_state(plan, State(state.cache.set_tables(indices, tables), state.rows))


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def admit(plan: Plan, params: Any, state: State, new: NewRows) -> State:
    """Assigns rows to new requests and encodes their sources; their prompts are read by `read_prompts`."""
    indices = new.indices
    cache = state.cache.start(indices, new.filled, new.tables, new.counts)
    if new.sources is not None:
        cache = _encode_sources(plan, params, cache, indices, new.sources)
    return constrain_state(
        plan, State(cache, set_rows(state.rows, indices, initial_rows(plan, new, state.rows.length)))
    )


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def read_prompts(plan: Plan, params: Any, state: State, indices: jax.Array, tokens: jax.Array) -> State:
    """Runs `prefill` on prompt tokens, int32 [P, T] with PAD on the left, in rows `indices`, int32 [P]."""
    own = prefill(plan.model, params, tokens, state.cache.take(indices))
    return constrain_state(plan, State(state.cache.put(indices, own), state.rows))


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def fork(
    plan: Plan, state: State, source: jax.Array, to: jax.Array, seeds: jax.Array, table: jax.Array, copies: jax.Array
) -> State:
    """Copies row `source` to row `to`, with other seeds.

    Args:
        source, to: int32 scalars.
        seeds: uint32 [2], as in `NewRows`.
        table: int32 [pages per row], page table of row `to`.
        copies: int32 [n, 2], pages to copy, (from, to); (0, 0) copies nothing.
    """
    rows = state.rows.fork(source, to, seeds)
    return constrain_state(plan, State(state.cache.fork(source, to, table, copies), rows))


@functools.partial(jax.jit, static_argnames=("plan", "pages"), donate_argnames=("state",))
def advance(
    plan: Plan,
    params: Any,
    state: State,
    ended: jax.Array,
    steps: jax.Array,
    min_done: jax.Array,
    *,
    pages: int | None,
) -> tuple[State, Steps]:
    """Runs several decoding steps for all running rows, without returning to the host between steps.

    Beam search also stops when a row has no room for its next tokens.

    Args:
        ended: bool [B], rows to end before the first step.
        steps: int32 scalar in 1, ..., `MAX_STEPS`: maximum number of steps.
        min_done: int32 scalar: stop when this number of rows is done, after at least one step.
        pages: number of pages per row to read, enough for the longest row after `steps` steps, or after the next one of
            beam search; None for a dense cache.

    Returns:
        The new state, and the results of the steps.
    """
    drafts = plan.decode.lookup_tokens > 0
    call = skip_drafts(step_fn(plan.model, params, last_only=False)) if drafts else step_fn(plan.model, params)

    def should_continue(carry: Carry) -> jax.Array:
        _, taken, rows, cache = carry
        return (taken == 0) | (taken < steps) & (rows.done.sum() < min_done) & rows.fits(cache)

    def step(carry: Carry) -> Carry:
        results, taken, rows, cache = carry
        tokens, ancestry = rows.next_tokens()
        logits, cache = call(tokens, cache, ancestry)
        rows = rows.advance(logits)
        cache = rows.trim(cache)
        results = jax.tree.map(lambda all_steps, now: all_steps.at[taken].set(now), results, rows.result())
        return results, taken + 1, rows, cache

    rows = state.rows.mark_done(ended)
    no_results = jax.tree.map(lambda leaf: jnp.zeros((MAX_STEPS, *leaf.shape), leaf.dtype), rows.result())
    initial = no_results, jnp.zeros((), jnp.int32), rows, state.cache.take(ALL, pages)
    results, taken, rows, cache = jax.lax.while_loop(should_continue, step, initial)
    steps_taken = jax.tree.map(replicate, Steps(results, taken, cache.first_slots.index))
    return constrain_state(plan, State(state.cache.put(ALL, cache), rows)), steps_taken


@jax.jit
def finished_hypotheses(rows: BeamState) -> Hypotheses:
    """Returns the finished hypotheses of beam search for each row."""
    return Hypotheses(*map(replicate, rows.finished))


def _encode_sources(
    plan: Plan, params: Any, cache: DecoderCache, indices: jax.Array, sources: jax.Array
) -> DecoderCache:
    assert cache.memory_padding_mask is not None
    variables, padding_mask = {"params": params}, sources != PAD
    memory = plan.model.apply(variables, sources, padding_mask, right_padded=True, method="encode")
    own: Any = plan.model.apply(variables, memory, padding_mask, 1, dtype=plan.decode.cache_dtype, method="init_cache")
    missing = cache.memory_padding_mask.shape[1] - sources.shape[1]

    def put_padded(memory: jax.Array, new: jax.Array) -> jax.Array:
        return memory.at[indices].set(jnp.pad(new, ((0, 0), (0, 0), (0, missing), (0, 0))), mode="drop")

    layers = tuple(
        LayerCache(layer.self_attention, jax.tree.map(put_padded, layer.cross_attention, read.cross_attention))
        for layer, read in zip(cache.layers, own.layers, strict=True)
    )
    mask = set_rows(cache.memory_padding_mask, indices, jnp.pad(padding_mask, ((0, 0), (0, missing))))
    return dataclasses.replace(cache, layers=layers, memory_padding_mask=mask)
