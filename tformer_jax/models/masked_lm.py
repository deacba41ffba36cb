"""Masked language models (BERT)."""

import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.embeddings import InputEmbedding, OutputHead, TokenEmbedding
from tformer_jax.nn.linear import Linear
from tformer_jax.nn.norms import make_norm
from tformer_jax.nn.padding import PaddingLast
from tformer_jax.nn.stacks import Encoder


class MaskedLM(nn.Module):
    """Predicts the token at each position from the tokens on both sides.

    Its parameters, except the head's, have the names of a `Classifier`'s, so that one can start from the other.
    """

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.embedding = TokenEmbedding(cfg, cfg.known("vocab_size"))
        self.input = InputEmbedding(cfg)
        self.encoder = Encoder(cfg, cfg.encoder_layers)
        if cfg.head_transform:
            self.transform = Linear(cfg, ((axes.EMBED, cfg.dim),), ((axes.MLP, cfg.dim),), use_bias=True)
            self.transform_norm = make_norm(cfg)
        self.head = OutputHead(cfg, axes.VOCAB, cfg.known("vocab_size"), cfg.output_bias)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        padding_mask: jax.Array | None = None,
        types: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Computes logits: tokens int [B, T] -> float32 [B, T, V]; arguments as for `features`."""
        return self.logits(self.features(tokens, padding_mask, types=types, right_padded=right_padded, train=train))

    def features(
        self,
        tokens: jax.Array,
        padding_mask: jax.Array | None = None,
        *,
        types: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Computes the inputs of `logits`: tokens int [B, T] -> [B, T, D].

        Args:
            padding_mask: bool [B, T], True for tokens that are not padding; None: all. Padding has no position.
            types: int [B, T], token types (such as first or second sentence), if `cfg.token_types` is not 0; None: 0.
            right_padded: padding is only at the end of each row, so that sorting is skipped.
        """
        rows = PaddingLast(padding_mask, right_padded=right_padded)
        tokens, padding_mask, types = rows.sort(tokens), rows.sort(padding_mask), rows.sort(types)
        x = self.input(self.embedding(tokens), types=types, train=train)
        return rows.restore(self.encoder(x, padding_mask, train=train))

    def lens(self, stream: jax.Array) -> jax.Array:
        """Computes float32 logits [B, T, V] from the residual stream [B, T, D] after any layer (the logit lens)."""
        return self.logits(self.encoder.finish(stream))

    def logits(self, x: jax.Array) -> jax.Array:
        """Projects features [..., D] to float32 logits [..., V]."""
        cfg = self.cfg
        if cfg.head_transform:
            x = self.transform_norm(kinds.load(kinds.ACTIVATIONS, cfg.activation)(self.transform(x)))
        return self.head(x, self.embedding if cfg.tie_embeddings == "output" else None)
