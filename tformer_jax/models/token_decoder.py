"""The decoder of target tokens that decoder-only and encoder-decoder models have in common."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.embeddings import InputEmbedding, OutputHead, TokenEmbedding
from tformer_jax.nn.kv_cache import DecoderCache, Lineage
from tformer_jax.nn.padding import RealFirst
from tformer_jax.nn.positions import token_positions
from tformer_jax.nn.stacks import Decoder


class TokenDecoder(nn.Module):
    """Base class of models that predict each target token from the target tokens before it."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.decoder = Decoder(cfg, cfg.decoder_layers, cross=cfg.family == "seq2seq")
        self.head = OutputHead(cfg, axes.VOCAB, cfg.known("vocab_size"), cfg.output_bias)

    def target_embeddings(self) -> tuple[TokenEmbedding, InputEmbedding]:
        """Returns the modules that embed target tokens."""
        raise NotImplementedError

    def __call__(self, *arguments: Any, **options: Any) -> jax.Array:
        """Takes the arguments of `features` and returns float32 logits [B, T, V]."""
        return self.logits(self.features(*arguments, **options))

    def decode(
        self,
        target: jax.Array,
        memory: jax.Array | None = None,
        memory_mask: jax.Array | None = None,
        *,
        target_mask: jax.Array | None = None,
        prefix: jax.Array | None = None,
        segments: jax.Array | None = None,
        memory_segments: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Decodes target tokens, int [B, T] -> features [B, T, D], the inputs of `logits`.

        Args:
            memory, memory_mask: the encoder's output [B, S, D] and its real tokens, bool [B, S] (None: all), if the
                decoder has cross-attention.
            target_mask: bool [B, T], real tokens; None: all. Padding takes no positions.
            prefix: int [B], number of leading real tokens that all tokens of a row may attend to (`cfg.prefix_lm`).
            segments, memory_segments: int [B, T] and [B, S], segment ids of documents packed into a row; documents do
                not affect each other.
            right_padded: padding is only at the end of each row, so that sorting is skipped.
        """
        rows = RealFirst(target_mask, right_padded=right_padded)
        target, mask, segments = rows.sort(target), rows.sort(target_mask), rows.sort(segments)
        embedding, input_embedding = self.target_embeddings()
        x = input_embedding(embedding(target), token_positions(target.shape[1], segments), train=train)
        x = self.decoder(
            x,
            mask,
            memory,
            memory_mask,
            prefix=prefix,
            segments=segments,
            memory_segments=memory_segments,
            train=train,
        )
        return rows.restore(x)

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
        embedding, input_embedding = self.target_embeddings()
        x = input_embedding(embedding(tokens), positions)
        x, admitted = self.decoder.step(x, admitted, real=real, positions=positions, seen=seen, lineage=lineage)
        return self.logits(x[:, -1:] if last_only else x), admitted

    def logits(self, x: jax.Array) -> jax.Array:
        """Projects features [..., D] to float32 logits [..., V]."""
        embedding, _ = self.target_embeddings()
        return self.head(x, embedding if self.cfg.tie_embeddings in ("output", "all") else None)
