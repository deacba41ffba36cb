"""Encoder-decoder models, as in "Attention Is All You Need" (2017)."""

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
from tformer_jax.nn.stacks import Decoder, Encoder


class Seq2Seq(nn.Module):
    """Encodes a source sequence, and predicts each target token from the source and the target tokens before it.

    `cfg.tie_embeddings` names which of source embedding, target embedding and output head share one matrix.
    """

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.target_embedding = TokenEmbedding(cfg, cfg.known("vocab_size"))
        if cfg.tie_embeddings in ("inputs", "all"):
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = TokenEmbedding(cfg, cfg.known("source_vocab_size"))
        self.source_input = InputEmbedding(cfg)
        self.target_input = InputEmbedding(cfg)
        self.encoder = Encoder(cfg, cfg.encoder_layers)
        self.decoder = Decoder(cfg, cfg.decoder_layers, cross=True)
        self.head = OutputHead(cfg, axes.VOCAB, cfg.known("vocab_size"), cfg.output_bias)

    def __call__(self, *arguments: Any, **options: Any) -> jax.Array:
        """Takes the arguments of `features` and returns float32 logits [B, T, V]."""
        return self.logits(self.features(*arguments, **options))

    def features(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_mask: jax.Array | None = None,
        target_mask: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Computes the inputs of `logits`: source int [B, S], target int [B, T] -> [B, T, D].

        Args:
            source_mask, target_mask: bool [B, S] and [B, T], real tokens; None: all. Padding takes no positions.
            source_segments, target_segments: int [B, S] and [B, T], segment ids of the pairs packed into a row; pairs
                do not affect each other.
            right_padded: padding is only at the end of each row, so that sorting is skipped.
        """
        return self.decode(
            target,
            self.encode(source, source_mask, source_segments, right_padded=right_padded, train=train),
            source_mask,
            target_mask=target_mask,
            segments=target_segments,
            memory_segments=source_segments,
            right_padded=right_padded,
            train=train,
        )

    def encode(
        self,
        source: jax.Array,
        source_mask: jax.Array | None,
        segments: jax.Array | None = None,
        *,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Encodes source int [B, S], real tokens bool [B, S], segments int [B, S] (None: one) -> memory [B, S, D]."""
        rows = RealFirst(source_mask, right_padded=right_padded)
        source, mask, segments = rows.sort(source), rows.sort(source_mask), rows.sort(segments)
        x = self.source_input(self.source_embedding(source), token_positions(source.shape[1], segments), train=train)
        return rows.restore(self.encoder(x, mask, segments, train=train))

    def decode(
        self,
        target: jax.Array,
        memory: jax.Array,
        memory_mask: jax.Array | None,
        *,
        target_mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        memory_segments: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Decodes target int [B, T] (shifted right), memory [B, S, D], memory_mask bool [B, S] -> features [B, T, D].

        `segments` (int [B, T]) and `memory_segments` (int [B, S]) are segment ids of pairs packed into a row.
        """
        rows = RealFirst(target_mask, right_padded=right_padded)
        target, mask, segments = rows.sort(target), rows.sort(target_mask), rows.sort(segments)
        x = self.target_input(self.target_embedding(target), token_positions(target.shape[1], segments), train=train)
        x = self.decoder(x, mask, memory, memory_mask, segments=segments, memory_segments=memory_segments, train=train)
        return rows.restore(x)

    def init_cache(
        self,
        memory: jax.Array,
        memory_mask: jax.Array | None,
        length: int,
        *,
        width: int = 1,
        dtype: str | None = None,
    ) -> DecoderCache:
        """Builds an empty cache for `length` target tokens, with cross-attention keys and values of memory [B, S, D].

        `width` is the maximum number of tokens at one position, `dtype` the storage dtype (None: `cfg.dtype`).
        """
        crosses = self.decoder.cross_keys_values(memory)
        return empty_cache(
            self.cfg,
            memory.shape[0],
            length,
            width=width,
            dtype=dtype,
            cross_attention=crosses,
            memory_mask=memory_mask,
        )

    def decode_step(
        self,
        tokens: jax.Array,
        cache: DecoderCache,
        *,
        token_mask: jax.Array | None = None,
        lineage: Lineage | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, DecoderCache]:
        """Decodes T more target tokens, int [B, T]; `token_mask` (bool [B, T]) marks the real ones (None: all).

        With a `lineage`, they are T beams at one position, each of which attends only to its ancestors.

        Returns:
            float32 logits [B, T, V], or [B, 1, V] of the last token if `last_only`, and the updated cache.
        """
        real = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
        admitted, positions, seen = cache.admit(real, side_by_side=lineage is not None)
        x = self.target_input(self.target_embedding(tokens), positions)
        x, admitted = self.decoder.step(x, admitted, real=real, positions=positions, seen=seen, lineage=lineage)
        return self.logits(x[:, -1:] if last_only else x), admitted

    def logits(self, x: jax.Array) -> jax.Array:
        """Projects features [..., D] to float32 logits [..., V]."""
        return self.head(x, self.target_embedding if self.cfg.tie_embeddings in ("output", "all") else None)
