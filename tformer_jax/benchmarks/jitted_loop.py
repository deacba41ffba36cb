"""Decoding of a whole batch in one compiled loop, without the engine.

`benchmark.py decode` compares the engine's speed with it, and the tests compare the engine's outputs with it. Each
function is compiled once for each model, input shape, `length` and decoding strategy. A row of PAD only fills up a
batch: nothing is generated for it.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import Beams, Hypotheses
from tformer_jax.inference.chains import Chains
from tformer_jax.inference.constraints import NO_RULES, Rules
from tformer_jax.inference.model_step import Step, prefill, step_fn
from tformer_jax.inference.rows import Rows
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn import conversions
from tformer_jax.nn.kv_cache import DecoderCache
from tformer_jax.special_tokens import BOS, PAD

AnyRows = TypeVar("AnyRows", bound=Rows)
_compiled = functools.partial(jax.jit, static_argnames=("model", "length", "cfg", "rules"))


@_compiled
def translate(
    model: Seq2Seq,
    params: Any,
    source: jax.Array,
    keys: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    rules: Rules = NO_RULES,
) -> jax.Array:
    """Decodes a target for each source.

    Args:
        source: int [B, S], PAD on the right, each row ended by EOS.
        keys: [B] PRNG keys for sampling; other strategies ignore them.
        length: maximum number of generated tokens, at most `model.cfg.max_length`.
        rules: constraints on outputs.

    Returns:
        int32 [B, length]: the target up to and including EOS, then PAD.
    """
    return _decode(_begin_translation(model, params, source, length, cfg), keys, length, cfg, rules)


@_compiled
def continue_text(
    model: DecoderLM,
    params: Any,
    prompt: jax.Array,
    keys: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    rules: Rules = NO_RULES,
) -> jax.Array:
    """Continues each prompt.

    Args:
        prompt: int [B, T], PAD on the left, at most `model.cfg.max_length` real tokens.
        keys: [B] PRNG keys for sampling; other strategies ignore them.
        length: maximum number of generated tokens; fewer where the prompt leaves less room in the model.
        rules: constraints on outputs.

    Returns:
        int32 [B, length]: the new tokens up to and including EOS, then PAD.
    """
    return _decode(_begin_continuation(model, params, prompt, length, cfg), keys, length, cfg, rules)


@_compiled
def best_translations(
    model: Seq2Seq, params: Any, source: jax.Array, *, length: int, cfg: DecodeConfig, rules: Rules = NO_RULES
) -> Hypotheses:
    """Beam search: the `cfg.beams` best targets of each source; arguments as of `translate`."""
    return _search(_begin_translation(model, params, source, length, cfg), length, cfg, rules)


@_compiled
def best_continuations(
    model: DecoderLM, params: Any, prompt: jax.Array, *, length: int, cfg: DecodeConfig, rules: Rules = NO_RULES
) -> Hypotheses:
    """Beam search: the `cfg.beams` best continuations of each prompt; arguments as of `continue_text`."""
    return _search(_begin_continuation(model, params, prompt, length, cfg), length, cfg, rules)


class _Begun(NamedTuple):
    """What decoding starts from."""

    step: Step
    prompt: jax.Array
    """int [B, T], PAD on the left."""
    cache: DecoderCache
    """Of all but the prompt's last token."""
    room: jax.Array
    """int [B]: maximum number of tokens of each row."""


def _begin_translation(model: Seq2Seq, params: Any, source: jax.Array, length: int, cfg: DecodeConfig) -> _Begun:
    model, params = _in_a_loop(model, params)
    variables, padding_mask = {"params": params}, source != PAD
    memory = model.apply(variables, source, padding_mask, method="encode")
    options: Any = {"width": cfg.width, "dtype": cfg.cache_dtype}
    cache: Any = model.apply(variables, memory, padding_mask, length, **options, method="init_cache")
    first = jnp.full((source.shape[0], 1), BOS, jnp.int32)
    return _Begun(step_fn(model, params), first, cache, jnp.where(padding_mask.any(axis=1), length, 0))


def _begin_continuation(model: DecoderLM, params: Any, prompt: jax.Array, length: int, cfg: DecodeConfig) -> _Begun:
    model, params = _in_a_loop(model, params)
    B, T = prompt.shape
    lengths = (prompt != PAD).sum(axis=1, dtype=jnp.int32)
    options: Any = {"width": cfg.width, "dtype": cfg.cache_dtype}
    cache: Any = model.apply({"params": params}, B, T + length, lengths, **options, method="init_cache")
    room = jnp.where(lengths > 0, jnp.minimum(length, model.cfg.max_length - lengths), 0)
    cache = prefill(model, params, prompt if model.cfg.prefix_lm else prompt[:, :-1], cache)
    return _Begun(step_fn(model, params), prompt, cache, room)


def _in_a_loop(model: Any, params: Any) -> tuple[Any, Any]:
    """The model and its parameters, with layers that are not scanned."""
    cfg, params = conversions.unrolled(model.cfg, params)
    return type(model)(cfg), params


def _decode(begun: _Begun, keys: jax.Array, length: int, cfg: DecodeConfig, rules: Rules) -> jax.Array:
    """int32 [B, length], by `cfg.strategy`."""
    if cfg.strategy == "beam":
        return _search(begun, length, cfg, rules).tokens[:, 0]
    counts = (begun.prompt != PAD).sum(axis=1, dtype=jnp.int32)
    history = jnp.pad(jax.vmap(jnp.roll)(begun.prompt, counts), ((0, 0), (0, length)), constant_values=PAD)
    settings = RowSettings.of(cfg, keys.shape[0])
    rows = Chains.start(begun.prompt[:, -1], counts, begun.room, keys, settings, rules, history=history)
    rows = _finish(begun.step, begun.cache, rows)
    columns = counts[:, None] + jnp.arange(length)
    return jnp.take_along_axis(rows.history, columns, axis=1)


def _search(begun: _Begun, length: int, cfg: DecodeConfig, rules: Rules) -> Hypotheses:
    counts = (begun.prompt != PAD).sum(axis=1, dtype=jnp.int32)
    settings = RowSettings.of(cfg, begun.room.shape[0])
    rows = Beams.start(begun.prompt[:, -1], counts, begun.room, settings, rules, length=length, cfg=cfg)
    return _finish(begun.step, begun.cache, rows).finished


def _finish(step: Step, cache: DecoderCache, rows: AnyRows) -> AnyRows:
    """Decodes until all rows are done."""

    def advance(state: tuple[AnyRows, DecoderCache]) -> tuple[AnyRows, DecoderCache]:
        rows, cache = state
        tokens, lineage = rows.next_tokens()
        logits, cache = step(tokens, cache, lineage)
        return rows.advance(logits), cache

    return jax.lax.while_loop(lambda state: ~state[0].done.all(), advance, (rows, cache))[0]
