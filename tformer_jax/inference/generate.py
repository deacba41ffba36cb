"""Generation with a KV cache: what has been read is never read again.

All functions are compiled once for each model, shape of the input, `length` and decoding strategy. A row that is
all PAD only fills up a batch: nothing is generated for it, and no step waits for it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import Beams, Hypotheses
from tformer_jax.inference.chains import Chains
from tformer_jax.inference.constraints import NO_RULES, Rules
from tformer_jax.inference.rows import Read, finish
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn import layouts
from tformer_jax.nn.kv_cache import DecoderCache, Lineage
from tformer_jax.special_tokens import BOS, PAD

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
        source: int [B, S], padded with PAD on the right, each row ended by EOS.
        keys: [B] PRNG keys of sampling; other strategies ignore them.
        length: the most tokens that are generated, at most `model.cfg.max_length`.
        rules: what outputs must and must not hold.

    Returns:
        int32 [B, length]: the target up to and including EOS, then PAD.
    """
    return _decode(begin_translation(model, params, source, length, cfg), keys, length, cfg, rules)


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
        prompt: int [B, T], padded with PAD on the left, at most `model.cfg.max_length` real tokens.
        keys: [B] PRNG keys of sampling; other strategies ignore them.
        length: the most tokens that are generated; a prompt that leaves less room in the model gets fewer.
        rules: what outputs must and must not hold.

    Returns:
        int32 [B, length]: the new tokens up to and including EOS, then PAD.
    """
    return _decode(begin_continuation(model, params, prompt, length, cfg), keys, length, cfg, rules)


@_compiled
def best_translations(
    model: Seq2Seq, params: Any, source: jax.Array, *, length: int, cfg: DecodeConfig, rules: Rules = NO_RULES
) -> Hypotheses:
    """The `cfg.beams` best targets of each source that beam search finds; arguments as of `translate`."""
    return _search(begin_translation(model, params, source, length, cfg), length, cfg, rules)


@_compiled
def best_continuations(
    model: DecoderLM, params: Any, prompt: jax.Array, *, length: int, cfg: DecodeConfig, rules: Rules = NO_RULES
) -> Hypotheses:
    """The `cfg.beams` best continuations of each prompt that beam search finds; arguments as of `continue_text`."""
    return _search(begin_continuation(model, params, prompt, length, cfg), length, cfg, rules)


class Begun(NamedTuple):
    """What decoding starts from."""

    read: Read
    prompt: jax.Array
    """int [B, T], PAD on the left."""
    cache: DecoderCache
    """Of all but the prompt's last token."""
    room: jax.Array
    """int [B]: the most tokens of each row."""


def begin_translation(
    model: Seq2Seq, params: Any, source: jax.Array, length: int, cfg: DecodeConfig, *, ragged: bool = False
) -> Begun:
    """Reads sources; with a `ragged` cache, rows may forget different numbers of tokens."""
    model, variables = as_loop(model, params)
    real = source != PAD
    memory = model.apply(variables, source, real, method="encode")
    options: Any = {"width": cfg.width, "ragged": ragged, "dtype": cfg.cache_dtype}
    cache: Any = model.apply(variables, memory, real, length, **options, method="init_cache")
    first = jnp.full((source.shape[0], 1), BOS, jnp.int32)
    room = jnp.where(real.any(axis=1), length, 0)
    return Begun(reader(model, variables), first, cache, room)


def begin_continuation(
    model: DecoderLM, params: Any, prompt: jax.Array, length: int, cfg: DecodeConfig, *, ragged: bool = False
) -> Begun:
    """Reads prompts; `ragged` as of `begin_translation`."""
    model, variables = as_loop(model, params)
    B, T = prompt.shape
    lengths = (prompt != PAD).sum(axis=1, dtype=jnp.int32)
    options: Any = {"width": cfg.width, "ragged": ragged, "dtype": cfg.cache_dtype}
    cache: Any = model.apply(variables, B, T + length, lengths, **options, method="init_cache")
    room = jnp.where(lengths > 0, jnp.minimum(length, model.cfg.max_length - lengths), 0)
    cache = read_prompt(model, variables, prompt if model.cfg.prefix_lm else prompt[:, :-1], cache)
    return Begun(reader(model, variables), prompt, cache, room)


def read_prompt(model: Seq2Seq | DecoderLM, variables: Any, tokens: jax.Array, cache: DecoderCache) -> DecoderCache:
    """Reads prompts (int [B, T], PAD on the left) but for their last token, which the first step of decoding reads.

    With `prefix_lm` the other tokens see the last one: then it is among `tokens`, and forgotten again.
    """
    if tokens.shape[1] == 0:
        return cache
    _, cache = reader(model, variables)(tokens, cache)
    return cache.forget(jnp.ones_like(cache.lengths)) if model.cfg.prefix_lm else cache


def reader(model: Seq2Seq | DecoderLM, variables: Any) -> Read:
    """The model as `finish` calls it; its layers are a loop."""

    def read(
        tokens: jax.Array, cache: DecoderCache, lineage: Lineage | None = None, *, last_only: bool = True
    ) -> tuple[jax.Array, DecoderCache]:
        options: Any = {"token_mask": tokens != PAD, "lineage": lineage, "last_only": lineage is None and last_only}
        result: Any = model.apply(variables, tokens, cache, **options, method="decode_step")
        return result

    return read


def as_loop(model: Any, params: Any) -> tuple[Any, Any]:
    """The model and its variables, with layers in a loop."""
    cfg, params = layouts.unrolled(model.cfg, params)
    return type(model)(cfg), {"params": params}


def _decode(begun: Begun, keys: jax.Array, length: int, cfg: DecodeConfig, rules: Rules) -> jax.Array:
    """int32 [B, length], as `cfg.strategy` says."""
    if cfg.strategy == "beam":
        return _search(begun, length, cfg, rules).tokens[:, 0]
    settings = RowSettings.of(cfg, keys.shape[0])
    rows = Chains.start(begun.prompt, begun.room, keys, settings, rules, length=length)
    return finish(begun.read, begun.cache, rows).outputs(length)


def _search(begun: Begun, length: int, cfg: DecodeConfig, rules: Rules) -> Hypotheses:
    """The outputs of beam search."""
    settings = RowSettings.of(cfg, begun.room.shape[0])
    rows = Beams.start(begun.prompt, begun.room, settings, rules, length=length, cfg=cfg)
    return finish(begun.read, begun.cache, rows).finished
