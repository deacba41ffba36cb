"""Encoder-decoder models, as in "Attention Is All You Need" (2017)."""

from types import MappingProxyType
from typing import Any

import jax

from tformer_jax.models import Batch
from tformer_jax.models.token_decoder import TokenDecoder
from tformer_jax.nn.decoder_cache import DecoderCache, empty_cache
from tformer_jax.nn.embeddings import InputEmbedding, TokenEmbedding
from tformer_jax.nn.padding import PaddingLast
from tformer_jax.nn.positions import token_positions
from tformer_jax.nn.stacks import Encoder
from tformer_jax.special_tokens import PAD


class Seq2Seq(TokenDecoder):
    """Encodes a source sequence, and predicts each target token from the source and the target tokens before it.

    `cfg.tie_embeddings` names which of source embedding, target embedding and output head share one matrix.
    """

    inputs = ("source", "target_in")
    labels = "target_out"
    stacks = ("encoder_layers", "decoder_layers")
    attentions = MappingProxyType(
        {
            "encoder": ("source", "source"),
            "decoder": ("target_in", "target_in"),
            "cross": ("target_in", "source"),
        }
    )
    input_name = "source"
    reads_source = True
    example = (2,), "a pair (source, target)"

    @staticmethod
    def arguments(batch: Batch) -> dict[str, Any]:
        """Returns the arguments of a call on a batch, whose rows may be packed (keys `..._segments`)."""
        source, target = batch["source"], batch["target_in"]
        return {
            "source": source,
            "target": target,
            "source_padding_mask": source != PAD,
            "target_padding_mask": target != PAD,
            "right_padded": True,
            "source_segments": batch.get("source_segments"),
            "target_segments": batch.get("target_segments"),
        }

    def setup(self) -> None:
        super().setup()
        cfg = self.cfg
        self.target_embedding = TokenEmbedding(cfg, cfg.size("vocab_size"))
        if cfg.tie_embeddings in ("inputs", "all"):
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = TokenEmbedding(cfg, cfg.size("source_vocab_size"))
        self.source_input = InputEmbedding(cfg)
        self.target_input = InputEmbedding(cfg)
        self.encoder = Encoder(cfg, cfg.encoder_layers)

    def target_embeddings(self) -> tuple[TokenEmbedding, InputEmbedding]:
        """Returns the modules that embed target tokens."""
        return self.target_embedding, self.target_input

    def features(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_padding_mask: jax.Array | None = None,
        target_padding_mask: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Computes the inputs of `logits`: source int [B, S], target int [B, T] -> [B, T, D].

        Args:
            source_padding_mask, target_padding_mask: bool [B, S] and [B, T], True for tokens that are not padding;
                None: all. Padding has no position.
            source_segments, target_segments: int [B, S] and [B, T], segment ids of the pairs packed into a row; pairs
                do not affect each other.
            right_padded: padding is only at the end of each row, so that sorting is skipped.
        """
        return self.decode(
            target,
            self.encode(source, source_padding_mask, source_segments, right_padded=right_padded, train=train),
            source_padding_mask,
            padding_mask=target_padding_mask,
            segments=target_segments,
            memory_segments=source_segments,
            right_padded=right_padded,
            train=train,
        )

    def encode(
        self,
        source: jax.Array,
        padding_mask: jax.Array | None,
        segments: jax.Array | None = None,
        *,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Encodes source tokens: int [B, S] -> memory [B, S, D]; arguments as for `features`."""
        rows = PaddingLast(padding_mask, right_padded=right_padded)
        source, padding_mask, segments = rows.sort(source), rows.sort(padding_mask), rows.sort(segments)
        x = self.source_input(self.source_embedding(source), token_positions(source.shape[1], segments), train=train)
        return rows.restore(self.encoder(x, padding_mask, segments=segments, train=train))

    def init_cache(
        self,
        memory: jax.Array,
        memory_padding_mask: jax.Array | None,
        length: int,
        *,
        width: int = 1,
        dtype: str | None = None,
    ) -> DecoderCache:
        """Builds an empty cache for `length` target tokens, with cross-attention keys and values of memory [B, S, D].

        `width` is the maximum number of tokens at one position, `dtype` the storage dtype (None: `cfg.dtype`).

        Raises:
            UserError: the layers are scanned.
        """
        crosses = self.decoder.cross_keys_values(memory)
        return empty_cache(
            self.cfg,
            memory.shape[0],
            length,
            width=width,
            dtype=dtype,
            cross_attention=crosses,
            memory_padding_mask=memory_padding_mask,
        )
