"""Base class of decoder-only and encoder-decoder models: the decoder of target tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.models.family import Family
from tformer_jax.nn.decoder_cache import DecoderCache
from tformer_jax.nn.embeddings import InputEmbedding, OutputHead, TokenEmbedding
from tformer_jax.nn.padding import PaddingLast
from tformer_jax.nn.positions import token_positions
from tformer_jax.nn.slots import BeamAncestry
from tformer_jax.nn.stacks import Decoder


class TokenDecoder(Family, nn.Module):
    """Base class of models that predict each target token from the target tokens before it."""

    decodes = True

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.decoder = Decoder(cfg, cfg.decoder_layers, cross=self.reads_source)
        self.head = OutputHead(cfg, axes.VOCAB, cfg.size("vocab_size"), cfg.output_bias)

    def target_embeddings(self) -> tuple[TokenEmbedding, InputEmbedding]:
        """Returns the modules that embed target tokens."""
        raise NotImplementedError

    def __call__(self, *arguments: Any, **options: Any) -> jax.Array:
        """Computes float32 logits [B, T, V]; arguments as for `features` of the model.

        `DecoderLM` takes tokens int [B, T], `Seq2Seq` source int [B, S] and target int [B, T].
        """
        return self.logits(self.features(*arguments, **options))

    def decode(
        self,
        target: jax.Array,
        memory: jax.Array | None = None,
        memory_padding_mask: jax.Array | None = None,
        *,
        padding_mask: jax.Array | None = None,
        prefix: jax.Array | None = None,
        segments: jax.Array | None = None,
        memory_segments: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Decodes target tokens, int [B, T] -> features [B, T, D], the inputs of `logits`.

        Args:
            memory: [B, S, D], the encoder's output, if the decoder has cross-attention.
            memory_padding_mask: bool [B, S], True for tokens of the source that are not padding; None: all.
            padding_mask: bool [B, T], True for tokens that are not padding; None: all. Padding has no position.
            prefix: int [B], number of leading real tokens that all tokens of a row may attend to (`cfg.prefix_lm`).
            segments, memory_segments: int [B, T] and [B, S], segment ids of documents packed into a row; documents do
                not affect each other.
            right_padded: padding is only at the end of each row, so that sorting is skipped.

        Raises:
            UserError: `prefix` is given without `cfg.prefix_lm`; a cache would not know it.
        """
        if prefix is not None and not self.cfg.prefix_lm:
            raise self.cfg.error("prefix_lm", "must be True for a model that is called with `prefix`")
        rows = PaddingLast(padding_mask, right_padded=right_padded)
        target, padding_mask, segments = rows.sort(target), rows.sort(padding_mask), rows.sort(segments)
        embedding, input_embedding = self.target_embeddings()
        x = input_embedding(embedding(target), token_positions(target.shape[1], segments), train=train)
        x = self.decoder(
            x,
            padding_mask,
            memory,
            memory_padding_mask,
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
        padding_mask: jax.Array | None = None,
        ancestry: BeamAncestry | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, DecoderCache]:
        """Decodes T more target tokens, int [B, T].

        Args:
            cache: as returned by `init_cache` or by the previous call.
            padding_mask: bool [B, T], True for tokens that are not padding; None: all.
            ancestry: the tokens are T beams at one position; each beam attends only to its ancestors.
            last_only: compute the logits of the last token only.

        Returns:
            float32 logits [B, T, V], or [B, 1, V] of the last token if `last_only`, and the updated cache.

        Raises:
            UserError: the layers are scanned, or, outside of compiled functions, the tokens do not fit in the cache.
        """
        padding_mask = jnp.ones(tokens.shape, bool) if padding_mask is None else padding_mask
        cache, positions, attended = cache.allocate(padding_mask, ancestry)
        embedding, input_embedding = self.target_embeddings()
        x = input_embedding(embedding(tokens), positions if ancestry is None else positions[:, :1])
        x, cache = self.decoder.step(
            x, cache, padding_mask=padding_mask, positions=positions, attended=attended, ancestry=ancestry
        )
        return self.logits(x[:, -1:] if last_only else x), cache

    def lens(self, stream: jax.Array) -> jax.Array:
        """Computes float32 logits [B, T, V] from the residual stream [B, T, D] after any layer (the logit lens)."""
        return self.logits(self.decoder.finish(stream))

    def logits(self, x: jax.Array) -> jax.Array:
        """Projects features [..., D] to float32 logits [..., V]."""
        embedding, _ = self.target_embeddings()
        return self.head(x, embedding if self.cfg.tie_embeddings in ("output", "all") else None)
