"""Continuation of prompts in one compiled loop, without the engine, whose outputs are compared with it."""

from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.constraints import NO_CONSTRAINTS, Constraints
from tformer_jax.inference.layout import unroll_layers
from tformer_jax.inference.model_step import prefill, step_fn
from tformer_jax.lab.benchmarks import jitted_loop
from tformer_jax.lab.benchmarks.jitted_loop import Start, compile_loop
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.special_tokens import PAD


@compile_loop
def continue_text(
    model: DecoderLM,
    params: Any,
    prompt: jax.Array,
    keys: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    constraints: Constraints = NO_CONSTRAINTS,
) -> jax.Array:
    """Continues each prompt.

    Args:
        prompt: int [B, T], PAD on the left, at most `model.cfg.max_length` real tokens.
        keys: [B] PRNG keys for sampling; other strategies ignore them.
        length: maximum number of generated tokens; fewer where the prompt leaves less space in the model.
        constraints: constraints on outputs.

    Returns:
        int32 [B, length]: the new tokens up to and including EOS, then PAD.
    """
    return jitted_loop.decode(start_continuation(model, params, prompt, length, cfg), keys, length, cfg, constraints)


def start_continuation(model: DecoderLM, params: Any, prompt: jax.Array, length: int, cfg: DecodeConfig) -> Start:
    """Reads the prompts; arguments are as for `continue_text`."""
    model, params = unroll_layers(model, params)
    B, T = prompt.shape
    lengths = (prompt != PAD).sum(axis=1, dtype=jnp.int32)
    options: Any = {"width": cfg.width, "dtype": cfg.cache_dtype}
    cache: Any = model.apply({"params": params}, B, T + length, lengths, **options, method="init_cache")
    max_new_tokens = jnp.where(lengths > 0, jnp.minimum(length, model.cfg.max_length - lengths), 0)
    cache = prefill(model, params, prompt if model.cfg.prefix_lm else prompt[:, :-1], cache)
    return Start(step_fn(model, params), prompt, cache, max_new_tokens)
