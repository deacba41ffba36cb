"""Calls of a model with a KV cache: prefill and decoding steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn.decoder_cache import DecoderCache
from tformer_jax.nn.slots import BeamAncestry
from tformer_jax.special_tokens import PAD

Step = Callable[..., tuple[jax.Array, DecoderCache]]
"""A model applied to new tokens and a cache of the earlier tokens: `step(tokens, cache, ancestry=None)`.

Returns float32 logits [B, 1, V] of the last token, and the new cache, for tokens int [B, T] and a cache. With an
`ancestry`, the T tokens of a row are beams, and logits are [B, T, V], as with `last_only=False` of `step_fn`.
"""


def step_fn(model: Seq2Seq | DecoderLM, params: Any, *, last_only: bool = True) -> Step:
    """Returns the decoding step of a model with unrolled layers."""

    def step(
        tokens: jax.Array, cache: DecoderCache, ancestry: BeamAncestry | None = None
    ) -> tuple[jax.Array, DecoderCache]:
        returned = {"last_only": last_only and ancestry is None}
        options: Any = {"padding_mask": tokens != PAD, "ancestry": ancestry, **returned}
        result: Any = model.apply({"params": params}, tokens, cache, **options, method="decode_step")
        return result

    return step


def prefill(model: Seq2Seq | DecoderLM, params: Any, tokens: jax.Array, cache: DecoderCache) -> DecoderCache:
    """Reads prompts, int [B, T] with PAD on the left, except the last token, which the first decoding step reads.

    With `prefix_lm`, earlier tokens attend to the last one, so `tokens` includes it, and it is then removed from the
    cache.
    """
    if tokens.shape[1] == 0:
        return cache
    _, cache = step_fn(model, params)(tokens, cache)
    return cache.remove_newest(jnp.ones_like(cache.lengths)) if model.cfg.prefix_lm else cache
