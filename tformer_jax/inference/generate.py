"""Generation with a KV cache: the tokens already read are never read again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.sampling import choose
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.kv_cache import DecoderCache
from tformer_jax.special_tokens import BOS, EOS, PAD


class _Loop(NamedTuple):
    chosen: jax.Array
    """int32 scalar: tokens chosen so far."""
    output: jax.Array
    """int32 [B, limit]."""
    finished: jax.Array
    """bool [B]: rows that have chosen EOS."""
    last: jax.Array
    """int32 [B]: the tokens chosen last, not yet read."""
    cache: DecoderCache
    key: jax.Array


def translate(
    model: Seq2Seq, params: Any, source: jax.Array, key: jax.Array, *, limit: int, cfg: DecodeConfig
) -> jax.Array:
    """Decodes a target for each source.

    Args:
        source: int [B, S], padded with PAD on the right, each row ended by EOS.
        key: of sampling; greedy decoding ignores it.
        limit: the most tokens that are generated.

    Returns:
        int32 [B, limit]: the target up to and including EOS, then PAD.
    """
    variables = {"params": params}
    mask = source != PAD
    memory = model.apply(variables, source, mask, method="encode")
    cache = model.apply(variables, memory, mask, limit, method="init_cache")
    first = jnp.full((source.shape[0], 1), BOS, jnp.int32)
    return _generate(model, variables, first, None, cache, key, limit, cfg)


def continue_text(
    model: DecoderLM, params: Any, prompt: jax.Array, key: jax.Array, *, limit: int, cfg: DecodeConfig
) -> jax.Array:
    """Continues each prompt.

    Args:
        prompt: int [B, T], padded with PAD on the left; no row is empty.
        key: of sampling; greedy decoding ignores it.
        limit: the most tokens that are generated.

    Returns:
        int32 [B, limit]: the new tokens up to and including EOS, then PAD.
    """
    variables = {"params": params}
    cache = model.apply(variables, prompt.shape[0], prompt.shape[1] + limit, method="init_cache")
    return _generate(model, variables, prompt, prompt != PAD, cache, key, limit, cfg)


def _generate(
    model: Any,
    variables: Any,
    prompt: jax.Array,
    prompt_mask: jax.Array | None,
    cache: Any,
    key: jax.Array,
    limit: int,
    cfg: DecodeConfig,
) -> jax.Array:
    """Reads the prompt at once, then one token a step, until every row has chosen EOS or `limit` is reached."""

    def read(tokens: jax.Array, mask: jax.Array | None, cache: DecoderCache) -> tuple[jax.Array, DecoderCache]:
        logits, cache = model.apply(variables, tokens, cache, token_mask=mask, last_only=True, method="decode_step")
        return logits[:, 0], cache

    def advance(state: _Loop, logits: jax.Array, cache: DecoderCache) -> _Loop:
        key, subkey = jax.random.split(state.key)
        token = jnp.where(state.finished, PAD, choose(logits, cfg, subkey))
        output = jax.lax.dynamic_update_slice(state.output, token[:, None], (0, state.chosen))
        return _Loop(state.chosen + 1, output, state.finished | (token == EOS), token, cache, key)

    def unfinished(state: _Loop) -> jax.Array:
        return (state.chosen < limit) & ~state.finished.all()

    def step(state: _Loop) -> _Loop:
        return advance(state, *read(state.last[:, None], None, state.cache))

    B = prompt.shape[0]
    start = _Loop(
        chosen=jnp.zeros((), jnp.int32),
        output=jnp.full((B, limit), PAD, jnp.int32),
        finished=jnp.zeros((B,), bool),
        last=jnp.full((B,), PAD, jnp.int32),
        cache=cache,
        key=key,
    )
    begun = advance(start, *read(prompt, prompt_mask, cache))
    return jax.lax.while_loop(unfinished, step, begun).output


def jitted(function: Callable[..., jax.Array], model: Any, cfg: DecodeConfig) -> Callable[..., jax.Array]:
    """`translate` or `continue_text` as a compiled function of (params, tokens, key, limit)."""

    def call(params, tokens, key, limit):
        return function(model, params, tokens, key, limit=limit, cfg=cfg)

    return jax.jit(call, static_argnums=3)
