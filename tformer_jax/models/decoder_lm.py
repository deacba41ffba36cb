"""Decoder-only language models (GPT)."""

from types import MappingProxyType
from typing import Any

import jax

from tformer_jax.models import Batch
from tformer_jax.models.token_decoder import TokenDecoder
from tformer_jax.nn.decoder_cache import DecoderCache, empty_cache
from tformer_jax.nn.embeddings import InputEmbedding, TokenEmbedding


class DecoderLM(TokenDecoder):
    """Predicts each token from the tokens before it."""

    stacks = ("decoder_layers",)
    attentions = MappingProxyType({"decoder": ("tokens", "tokens")})
    input_name = "prompt"
    continues = True
    example = (1, 2), "one text or a pair (prompt, continuation)"

    @staticmethod
    def arguments(batch: Batch) -> dict[str, Any]:
        """Returns the arguments of a call on a batch, which may have `prefix` and the `segments` of packed rows."""
        options = {"prefix": batch.get("prefix"), "segments": batch.get("segments")}
        return TokenDecoder.arguments(batch) | options

    def setup(self) -> None:
        super().setup()
        self.embedding = TokenEmbedding(self.cfg, self.cfg.size("vocab_size"))
        self.input = InputEmbedding(self.cfg)

    def target_embeddings(self) -> tuple[TokenEmbedding, InputEmbedding]:
        """Returns the modules that embed tokens."""
        return self.embedding, self.input

    def features(
        self,
        tokens: jax.Array,
        *,
        padding_mask: jax.Array | None = None,
        prefix: jax.Array | None = None,
        segments: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Computes the inputs of `logits`: tokens int [B, T] -> [B, T, D].

        Args:
            padding_mask, prefix, segments, right_padded: as for `decode`.
        """
        return self.decode(
            tokens, padding_mask=padding_mask, prefix=prefix, segments=segments, right_padded=right_padded, train=train
        )

    def init_cache(
        self,
        batch: int,
        length: int,
        prompt_lengths: jax.Array | None = None,
        *,
        width: int = 1,
        dtype: str | None = None,
    ) -> DecoderCache:
        """Builds an empty cache for `length` tokens in each of `batch` rows.

        Args:
            prompt_lengths: int32 [B], number of real tokens of each prompt, to which all tokens attend with
                `cfg.prefix_lm`, which requires it.
            width: maximum number of tokens at one position.
            dtype: storage dtype, a floating dtype or `int8`; None: `cfg.dtype`.

        Raises:
            UserError: `prompt_lengths` are missing.
        """
        if self.cfg.prefix_lm and prompt_lengths is None:
            raise self.cfg.error("prefix_lm", "needs `prompt_lengths`")
        prefix = prompt_lengths if self.cfg.prefix_lm else None
        return empty_cache(self.cfg, batch, length, width=width, dtype=dtype, prefix=prefix)
