"""Embeddings of texts: the last hidden states of a model, pooled over the tokens of each text."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.config.kinds import EMBEDDING_POOLINGS, POOLINGS
from tformer_jax.data.placeholders import mask
from tformer_jax.data.tokenizers import NO_PLACEHOLDERS, Tokenizers
from tformer_jax.inference.batching import TextProcessor, compute_rows
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.models import registry
from tformer_jax.models.classifier import pool
from tformer_jax.nn.sharding import replicate
from tformer_jax.special_tokens import PAD


class Embedder(TextProcessor[str, list[int], np.ndarray]):
    """Embeds texts with the encoder of a `Classifier`, `MaskedLM` or `Seq2Seq` model, or with a `DecoderLM` model.

    Results are float32 [D]. The special tokens around a text count as its tokens; an embedding of no token is zero.

    Args:
        pooling: a value of `embed.pooling`; None: as `cfg` says.
        normalize: divide each embedding by its Euclidean norm; None: as `cfg` says.
        prompt: name of a prompt of `embed.prompts`, which is put before each text; "": none; None: as `cfg` says.

    Raises:
        UserError: `pooling` or `prompt` is unknown.
    """

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        tokenizers: Tokenizers,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
    ):
        super().__init__(cfg, model, tokenizers)
        self.pooling = cfg.embed.pooling if pooling is None else pooling
        if self.pooling not in EMBEDDING_POOLINGS:
            raise UserError(f"pooling={pooling!r}: must be one of {', '.join(EMBEDDING_POOLINGS)}")
        check_type("normalize", normalize, bool | None, "True, False or None")
        self.normalize = cfg.embed.normalize if normalize is None else normalize
        self.prompt = cfg.embed.prompt if prompt is None else prompt
        self._before = cfg.embed.prompt_text(self.prompt)
        self._pair = cfg.model.model_class.reads_source

    def _encode(self, long_texts: LongTexts, index: int, text: str) -> list[int]:
        tokenizer = self.tokenizers.source if self._pair else self.tokenizers.target
        special = tokenizer.special
        text_rules, side_rules = (special.wrap_text, special.added_to_text), (special.wrap_side, special.added_to_side)
        wrap, added = side_rules if self._pair else text_rules
        limit = (self.cfg.embed.max_length or self.cfg.model.max_length) - added
        names = self.tokenizers.placeholders if self._pair else NO_PLACEHOLDERS
        read = mask(names, self._before + text).text
        return wrap(long_texts.fit(index, tokenizer.encode(read), limit, "text") or [])

    def _compute(self, params: Any, rows: list[list[int]]) -> Iterator[np.ndarray]:
        size = self.cfg.eval.batch_size
        return embed_rows(self.model, params, rows, size, pooling=self.pooling, normalize=self.normalize)


def embed_rows(
    model: nn.Module,
    params: Any,
    rows: Sequence[Sequence[int]],
    batch_size: int,
    *,
    pooling: str = "mean",
    normalize: bool = False,
) -> Iterator[np.ndarray]:
    """Yields the embedding of each row of token ids, float32 [D]; `pooling` and `normalize` are as for `Embedder`."""
    function = functools.partial(embeddings, pooling=pooling, normalize=normalize)
    return compute_rows(function, model, params, [{"tokens": row} for row in rows], batch_size)


@functools.partial(jax.jit, static_argnames=("model", "pooling", "normalize"))
def embeddings(model: nn.Module, params: Any, batch: registry.Batch, *, pooling: str, normalize: bool) -> jax.Array:
    """Returns embeddings, float32 [B, D], of tokens int [B, S] with PAD on the right; 0 for empty rows."""
    tokens = batch["tokens"]
    real = tokens != PAD
    if model.reads_source:
        x: Any = model.apply({"params": params}, tokens, real, right_padded=True, method="encode")
    else:
        x = model.apply({"params": params}, tokens, padding_mask=real, right_padded=True, method="features")
    pooled = _pool_tokens(x, real, pooling).astype(jnp.float32) * real.any(axis=1, keepdims=True)
    if normalize:
        pooled /= jnp.maximum(jnp.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
    return replicate(pooled)


def _pool_tokens(x: jax.Array, real: jax.Array, kind: str) -> jax.Array:
    """Pools x [B, S, D] over the tokens where `real`, bool [B, S], is True: [B, D]; the kinds are `embed.pooling`'s."""
    if kind in POOLINGS:
        return pool(x, real, kind)
    if kind == "max":
        return jnp.where(real[..., None], x, jnp.finfo(x.dtype).min).max(axis=1)
    positions = jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)
    weights = real * (positions if kind == "weighted_mean" else 1.0)
    total = weights.sum(axis=1, keepdims=True)
    divisor = jnp.sqrt(total) if kind == "mean_sqrt" else total
    return jnp.einsum("BSD,BS->BD", x, weights, preferred_element_type=jnp.float32) / jnp.maximum(divisor, 1)
