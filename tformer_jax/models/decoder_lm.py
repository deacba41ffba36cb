"""Decoder-only language models (GPT)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.embeddings import InputEmbedding, OutputHead, TokenEmbedding
from tformer_jax.nn.kv_cache import DecoderCache, Lineage, empty_cache
from tformer_jax.nn.padding import RealFirst
from tformer_jax.nn.positions import token_positions
from tformer_jax.nn.stacks import Decoder


class DecoderLM(nn.Module):
    """Predicts each token from the tokens before it."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.embedding = TokenEmbedding(cfg, cfg.known("vocab_size"))
        self.input = InputEmbedding(cfg)
        self.decoder = Decoder(cfg, cfg.decoder_layers)
        self.head = OutputHead(cfg, axes.VOCAB, cfg.known("vocab_size"), cfg.output_bias)

    def __call__(self, *arguments: Any, **options: Any) -> jax.Array:
        """Takes the arguments of `features` and returns float32 logits [B, T, V]."""
        return self.logits(self.features(*arguments, **options))

    def features(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        prefix: jax.Array | None = None,
        segments: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Computes the inputs of `logits`: tokens int [B, T] -> [B, T, D].

        Args:
            mask: bool [B, T], real tokens; None: all. Padding takes no positions.
            prefix: int [B], number of leading real tokens that all tokens of a row may attend to (`cfg.prefix_lm`).
            segments: int [B, T], segment ids of documents packed into a row; documents do not affect each other.
            right_padded: padding is only at the end of each row, so that sorting is skipped.
        """
        rows = RealFirst(mask, right_padded=right_padded)
        tokens, mask, segments = rows.sort(tokens), rows.sort(mask), rows.sort(segments)
        x = self.input(self.embedding(tokens), token_positions(tokens.shape[1], segments), train=train)
        return rows.restore(self.decoder(x, mask, prefix=prefix, segments=segments, train=train))

    def init_cache(
        self,
        batch: int,
        length: int,
        prompt: jax.Array | None = None,
        *,
        width: int = 1,
        dtype: str | None = None,
    ) -> DecoderCache:
        """Builds an empty cache for `length` tokens in each of `batch` rows.

        Args:
            prompt: int32 [B], number of real tokens of each prompt; with `cfg.prefix_lm`, all tokens attend to them.
            width: maximum number of tokens at one position.
            dtype: storage dtype, a floating dtype or `int8`; None: `cfg.dtype`.
        """
        prefix = prompt if self.cfg.prefix_lm else None
        return empty_cache(self.cfg, batch, length, width=width, dtype=dtype, prefix=prefix)

    def decode_step(
        self,
        tokens: jax.Array,
        cache: DecoderCache,
        *,
        token_mask: jax.Array | None = None,
        lineage: Lineage | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, DecoderCache]:
        """Decodes T more tokens, int [B, T]; `token_mask` (bool [B, T]) marks the real ones (None: all).

        With a `lineage`, they are T beams at one position, each of which attends only to its ancestors.

        Returns:
            float32 logits [B, T, V], or [B, 1, V] of the last token if `last_only`, and the updated cache.
        """
        real = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
        admitted, positions, seen = cache.admit(real, side_by_side=lineage is not None)
        x = self.input(self.embedding(tokens), positions)
        x, admitted = self.decoder.step(x, admitted, real=real, positions=positions, seen=seen, lineage=lineage)
        return self.logits(x[:, -1:] if last_only else x), admitted

    def logits(self, x: jax.Array) -> jax.Array:
        """Projects features [..., D] to float32 logits [..., V]."""
        return self.head(x, self.embedding if self.cfg.tie_embeddings == "output" else None)
