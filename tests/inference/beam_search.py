"""Beam search of a whole batch by the jitted loop, with all hypotheses."""

import functools
from typing import Any

import jax

from tests.inference.jitted_continuation import start_continuation
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import Hypotheses
from tformer_jax.inference.constraints import NO_CONSTRAINTS, Constraints
from tformer_jax.inference.forced import ForcedTokens
from tformer_jax.lab.benchmarks.jitted_loop import search, start_translation
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq

_compiled = functools.partial(jax.jit, static_argnames=("model", "length", "cfg", "constraints"))


@_compiled
def best_translations(
    model: Seq2Seq,
    params: Any,
    source: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    constraints: Constraints = NO_CONSTRAINTS,
    forced: ForcedTokens | None = None,
) -> Hypotheses:
    """Returns the `cfg.beams` best targets of each source; arguments are as for `jitted_loop.translate`."""
    start = start_translation(model, params, source, length, cfg)
    return search(start._replace(forced=forced), length, cfg, constraints)


@_compiled
def best_continuations(
    model: DecoderLM,
    params: Any,
    prompt: jax.Array,
    *,
    length: int,
    cfg: DecodeConfig,
    constraints: Constraints = NO_CONSTRAINTS,
) -> Hypotheses:
    """Returns the `cfg.beams` best continuations of each prompt; arguments are those of `continue_text`."""
    return search(start_continuation(model, params, prompt, length, cfg), length, cfg, constraints)
