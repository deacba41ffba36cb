"""The decoder-only language model (GPT)."""

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
    """Predicts each token from those before it."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.embedding = TokenEmbedding(cfg, cfg.known("vocab_size"))
        self.input = InputEmbedding(cfg)
        self.decoder = Decoder(cfg, cfg.decoder_layers)
        self.head = OutputHead(cfg, axes.VOCAB, cfg.known("vocab_size"), cfg.output_bias)

    def __call__(self, *arguments: Any, **options: Any) -> jax.Array:
        """The arguments of `features` -> float32 logits [B, T, V]."""
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
        """tokens int [B, T], real tokens bool [B, T] (None: all) -> [B, T, D], for `logits`.

        Args:
            mask: real tokens; padding between them takes no position.
            prefix: int [B], the number of first real tokens of a row that all its tokens see (`cfg.prefix_lm`).
            segments: int [B, T], the documents that are packed into a row; each is read as if it stood alone.
            right_padded: the padding of each row stands at its end, and sorting is saved.
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
        """An empty cache for `length` tokens in each of `batch` rows.

        Args:
            prompt: int32 [B], the real tokens of each prompt; with `cfg.prefix_lm`, all tokens see them.
            width: tokens that may stand side by side at each position.
            dtype: of storage, a floating dtype or `int8`; None: `cfg.dtype`.
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
        """Reads T more tokens, int [B, T]; `token_mask` (bool [B, T]) marks the real ones (None: all).

        With a `lineage` they are T beams at one position instead, of which each sees its ancestors.

        Returns:
            float32 logits [B, T, V], or [B, 1, V] of the last token where `last_only`, and the cache that holds them.
        """
        real = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
        admitted, positions, seen = cache.admit(real, side_by_side=lineage is not None)
        x = self.input(self.embedding(tokens), positions)
        x, admitted = self.decoder.step(x, admitted, real=real, positions=positions, seen=seen, lineage=lineage)
        return self.logits(x[:, -1:] if last_only else x), admitted

    def logits(self, x: jax.Array) -> jax.Array:
        """features [..., D] -> float32 [..., V]."""
        return self.head(x, self.embedding if self.cfg.tie_embeddings == "output" else None)
