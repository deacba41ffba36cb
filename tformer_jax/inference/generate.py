"""Generation with a KV cache: what has been read is never read again.

All functions are compiled once for each model, shape of the input, `length` and decoding strategy. A row that is
all PAD only fills up a batch: nothing is generated for it, and no step waits for it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference import beam
from tformer_jax.inference.sampling import choose
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn import layouts
from tformer_jax.nn.kv_cache import DecoderCache, Lineage
from tformer_jax.special_tokens import BOS, EOS, PAD

_compiled = functools.partial(jax.jit, static_argnames=("model", "length", "cfg"))


@_compiled
def translate(
    model: Seq2Seq, params: Any, source: jax.Array, keys: jax.Array, *, length: int, cfg: DecodeConfig
) -> jax.Array:
    """Decodes a target for each source.

    Args:
        source: int [B, S], padded with PAD on the right, each row ended by EOS.
        keys: [B] PRNG keys of sampling; greedy decoding ignores them.
        length: the most tokens that are generated, at most `model.cfg.max_length`.

    Returns:
        int32 [B, length]: the target up to and including EOS, then PAD.
    """
    return _decode(_begin_translation(model, params, source, length, cfg), keys, length, cfg)


@_compiled
def continue_text(
    model: DecoderLM, params: Any, prompt: jax.Array, keys: jax.Array, *, length: int, cfg: DecodeConfig
) -> jax.Array:
    """Continues each prompt.

    Args:
        prompt: int [B, T], padded with PAD on the left, at most `model.cfg.max_length` real tokens.
        keys: [B] PRNG keys of sampling; greedy decoding ignores them.
        length: the most tokens that are generated; a prompt that leaves less room in the model gets fewer.

    Returns:
        int32 [B, length]: the new tokens up to and including EOS, then PAD.
    """
    return _decode(_begin_continuation(model, params, prompt, length, cfg), keys, length, cfg)


@_compiled
def best_translations(
    model: Seq2Seq, params: Any, source: jax.Array, *, length: int, cfg: DecodeConfig
) -> beam.Hypotheses:
    """The `cfg.beams` best targets of each source that beam search finds; arguments as of `translate`."""
    begun = _begin_translation(model, params, source, length, cfg)
    return beam.search(begun.read, begun.prompt, begun.cache, begun.room, length, cfg)


@_compiled
def best_continuations(
    model: DecoderLM, params: Any, prompt: jax.Array, *, length: int, cfg: DecodeConfig
) -> beam.Hypotheses:
    """The `cfg.beams` best continuations of each prompt that beam search finds; arguments as of `continue_text`."""
    begun = _begin_continuation(model, params, prompt, length, cfg)
    return beam.search(begun.read, begun.prompt, begun.cache, begun.room, length, cfg)


class _Begun(NamedTuple):
    """What decoding starts from."""

    read: beam.Read
    prompt: jax.Array
    """int [B, T]."""
    cache: DecoderCache
    room: jax.Array
    """int [B]: the most tokens of each row."""


def _begin_translation(model: Seq2Seq, params: Any, source: jax.Array, length: int, cfg: DecodeConfig) -> _Begun:
    model, variables = _as_loop(model, params)
    real = source != PAD
    memory = model.apply(variables, source, real, method="encode")
    options: Any = {"width": cfg.width, "dtype": cfg.cache_dtype}
    cache: Any = model.apply(variables, memory, real, length, **options, method="init_cache")
    first = jnp.full((source.shape[0], 1), BOS, jnp.int32)
    return _Begun(_reader(model, variables), first, cache, jnp.where(real.any(axis=1), length, 0))


def _begin_continuation(model: DecoderLM, params: Any, prompt: jax.Array, length: int, cfg: DecodeConfig) -> _Begun:
    model, variables = _as_loop(model, params)
    B, T = prompt.shape
    lengths = (prompt != PAD).sum(axis=1, dtype=jnp.int32)
    options: Any = {"width": cfg.width, "dtype": cfg.cache_dtype}
    cache: Any = model.apply(variables, B, T + length, lengths, **options, method="init_cache")
    room = jnp.where(lengths > 0, jnp.minimum(length, model.cfg.max_length - lengths), 0)
    return _Begun(_reader(model, variables), prompt, cache, room)


def _reader(model: Seq2Seq | DecoderLM, variables: Any) -> beam.Read:
    def read(tokens: jax.Array, cache: DecoderCache, lineage: Lineage | None = None) -> tuple[jax.Array, DecoderCache]:
        options: Any = {"token_mask": tokens != PAD, "lineage": lineage, "last_only": lineage is None}
        result: Any = model.apply(variables, tokens, cache, **options, method="decode_step")
        return result

    return read


def _as_loop(model: Any, params: Any) -> tuple[Any, Any]:
    """The model and its variables, with layers in a loop."""
    cfg, params = layouts.unrolled(model.cfg, params)
    return type(model)(cfg), {"params": params}


class _State(NamedTuple):
    step: jax.Array
    """int32 scalar: tokens chosen so far."""
    output: jax.Array
    """int32 [B, length]."""
    done: jax.Array
    """bool [B]: rows that have chosen EOS or have no room left."""
    last: jax.Array
    """int32 [B]: the tokens chosen last, not yet read; PAD in rows that were done before."""
    cache: DecoderCache


def _decode(begun: _Begun, keys: jax.Array, length: int, cfg: DecodeConfig) -> jax.Array:
    """int32 [B, length], as `cfg.strategy` says."""
    if cfg.strategy == "beam":
        return beam.search(begun.read, begun.prompt, begun.cache, begun.room, length, cfg).tokens[:, 0]
    return _generate(begun, keys, length, cfg)


def _generate(begun: _Begun, keys: jax.Array, length: int, cfg: DecodeConfig) -> jax.Array:
    """Reads the prompt at once, then one token a step, until each row has chosen EOS or `room` tokens."""

    def write(state: _State, logits: jax.Array, cache: DecoderCache) -> _State:
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step)
        token = jnp.where(state.done, PAD, choose(logits[:, 0], cfg, step_keys))
        output = jax.lax.dynamic_update_slice(state.output, token[:, None], (0, state.step))
        done = state.done | (token == EOS) | (state.step + 1 >= begun.room)
        return _State(state.step + 1, output, done, token, cache)

    def advance(state: _State) -> _State:
        return write(state, *begun.read(state.last[:, None], state.cache))

    B = begun.prompt.shape[0]
    start = _State(
        step=jnp.zeros((), jnp.int32),
        output=jnp.full((B, length), PAD, jnp.int32),
        done=begun.room <= 0,
        last=jnp.full((B,), PAD, jnp.int32),
        cache=begun.cache,
    )
    first = write(start, *begun.read(begun.prompt, begun.cache))
    return jax.lax.while_loop(lambda state: ~state.done.all(), advance, first).output
