"""Masked language models (BERT)."""

from typing import Any

import jax

from tformer_jax import axes
from tformer_jax.models.token_encoder import TokenEncoder
from tformer_jax.nn.embeddings import OutputHead


class MaskedLM(TokenEncoder):
    """Predicts the token at each position from the tokens on both sides."""

    fills_masks = True

    def setup(self) -> None:
        super().setup()
        cfg = self.cfg
        self.head = OutputHead(self.head_cfg, axes.VOCAB, cfg.size("vocab_size"), cfg.output_bias)

    def __call__(self, tokens: jax.Array, padding_mask: jax.Array | None = None, **options: Any) -> jax.Array:
        """Computes logits: tokens int [B, T] -> float32 [B, T, V]; arguments as for `features`."""
        return self.logits(self.features(tokens, padding_mask, **options))

    def lens(self, stream: jax.Array) -> jax.Array:
        """Computes float32 logits [B, T, V] from the residual stream [B, T, D] after any layer (the logit lens)."""
        return self.logits(self.encoder.finish(stream))

    def logits(self, x: jax.Array) -> jax.Array:
        """Projects features [..., D] to float32 logits [..., V]."""
        return self.head(self.transformed(x), self.embedding if self.cfg.tie_embeddings == "output" else None)
