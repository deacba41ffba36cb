"""Decoding of a whole batch in one compiled loop, without the engine.

`benchmark.py decode` compares the engine's speed with it, and the tests compare the engine's outputs with it.
`translate` is compiled once for each model, input shape, `length` and decoding strategy. Nothing is generated for rows
of PAD, which only fill up a batch.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import BeamState, Hypotheses
from tformer_jax.inference.constraints import NO_CONSTRAINTS, Constraints
from tformer_jax.inference.decoding_state import DecodingState, SamplingState
from tformer_jax.inference.forced import ForcedTokens
from tformer_jax.inference.layout import unroll_layers
from tformer_jax.inference.model_step import Step, step_fn
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.decoder_cache import DecoderCache
from tformer_jax.special_tokens import BOS, PAD

AnyState = TypeVar("AnyState", bound=DecodingState)
compile_loop = functools.partial(jax.jit, static_argnames=("model", "length", "cfg", "constraints"))


@compile_loop
def translate(
    model: Seq2Seq,
    params: Any,
    source: jax.Array,
    keys: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    constraints: Constraints = NO_CONSTRAINTS,
) -> jax.Array:
    """Decodes a target for each source.

    Args:
        source: int [B, S], PAD on the right, each row ended by EOS.
        keys: [B] PRNG keys for sampling; other strategies ignore them.
        length: maximum number of generated tokens, at most `model.cfg.max_length`.
        constraints: constraints on outputs.

    Returns:
        int32 [B, length]: the target up to and including EOS, then PAD.
    """
    return decode(start_translation(model, params, source, length, cfg), keys, length, cfg, constraints)


def row_keys(seed: int, indices: np.ndarray) -> jax.Array:
    """Returns one PRNG key per row from its index among all inputs, int [B], so that batching does not matter."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), indices)


class Start(NamedTuple):
    """Inputs of the decoding loop."""

    step: Step
    prompt: jax.Array
    """int [B, T], PAD on the left."""
    cache: DecoderCache
    """Contains all prompt tokens except the last."""
    max_new_tokens: jax.Array
    """int [B]: maximum number of tokens of each row."""
    forced: ForcedTokens | None = None
    """Tokens with which outputs start; None: all are chosen."""


def start_translation(model: Seq2Seq, params: Any, source: jax.Array, length: int, cfg: DecodeConfig) -> Start:
    """Encodes the sources; arguments are as for `translate`."""
    model, params = unroll_layers(model, params)
    variables, padding_mask = {"params": params}, source != PAD
    memory = model.apply(variables, source, padding_mask, right_padded=True, method="encode")
    options: Any = {"width": cfg.width, "dtype": cfg.cache_dtype}
    cache: Any = model.apply(variables, memory, padding_mask, length, **options, method="init_cache")
    first = jnp.full((source.shape[0], 1), BOS, jnp.int32)
    return Start(step_fn(model, params), first, cache, jnp.where(padding_mask.any(axis=1), length, 0))


def search(start: Start, length: int, cfg: DecodeConfig, constraints: Constraints) -> Hypotheses:
    """Returns the `cfg.beams` best outputs of beam search."""
    counts = (start.prompt != PAD).sum(axis=1, dtype=jnp.int32)
    settings = RowSettings.from_config(cfg, start.max_new_tokens.shape[0])
    history = _left_aligned(start.prompt, counts, length) if constraints.need_history else None
    options: Any = {"length": length, "cfg": cfg, "history": history, "forced": start.forced}
    rows = BeamState.start(start.prompt[:, -1], counts, start.max_new_tokens, settings, constraints, **options)
    return _finish(start.step, start.cache, rows).finished


def decode(start: Start, keys: jax.Array, length: int, cfg: DecodeConfig, constraints: Constraints) -> jax.Array:
    """Decodes with `cfg.strategy`: int32 [B, length]."""
    if cfg.strategy == "beam":
        return search(start, length, cfg, constraints).tokens[:, 0]
    counts = (start.prompt != PAD).sum(axis=1, dtype=jnp.int32)
    history = _left_aligned(start.prompt, counts, length)
    settings = RowSettings.from_config(cfg, keys.shape[0])
    options: Any = {"history": history, "forced": start.forced}
    rows = SamplingState.start(
        start.prompt[:, -1], counts, start.max_new_tokens, keys, settings, constraints, **options
    )
    rows = _finish(start.step, start.cache, rows)
    columns = counts[:, None] + jnp.arange(length)
    return jnp.take_along_axis(rows.history, columns, axis=1)


def _left_aligned(prompt: jax.Array, counts: jax.Array, length: int) -> jax.Array:
    """Moves the PAD of prompts, [B, T], to the right and adds `length` columns of it."""
    return jnp.pad(jax.vmap(jnp.roll)(prompt, counts), ((0, 0), (0, length)), constant_values=PAD)


def _finish(step: Step, cache: DecoderCache, rows: AnyState) -> AnyState:
    """Decodes until all rows are done."""

    def advance(state: tuple[AnyState, DecoderCache]) -> tuple[AnyState, DecoderCache]:
        rows, cache = state
        tokens, ancestry = rows.next_tokens()
        logits, cache = step(tokens, cache, ancestry)
        return rows.advance(logits), cache

    return jax.lax.while_loop(lambda state: ~state[0].done.all(), advance, (rows, cache))[0]
