"""Sequence classifier: an encoder, pooling of its outputs, and one logit per class."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.embeddings import InputEmbedding, OutputHead, TokenEmbedding
from tformer_jax.nn.linear import Linear
from tformer_jax.nn.padding import PaddingLast
from tformer_jax.nn.stacks import Encoder


def mean_pool(x: jax.Array, padding_mask: jax.Array | None) -> jax.Array:
    """Averages x [B, S, D] over the tokens that are not padding: float32 [B, D]; zeros for an empty row."""
    weights = jnp.ones(x.shape[:2]) if padding_mask is None else padding_mask.astype(jnp.float32)
    total = jnp.einsum("BSD,BS->BD", x, weights, preferred_element_type=jnp.float32)
    return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1)


def pool_token(x: jax.Array, padding_mask: jax.Array | None, *, last: bool) -> jax.Array:
    """Returns the first (or last) token of x [B, S, D] that is not padding: [B, D]."""
    if padding_mask is None:
        return x[:, -1 if last else 0]
    index = padding_mask.shape[1] - 1 - padding_mask[:, ::-1].argmax(axis=1) if last else padding_mask.argmax(axis=1)
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def pool(x: jax.Array, padding_mask: jax.Array | None, kind: str) -> jax.Array:
    """Pools x [B, S, D] over the tokens that are not padding: [B, D].

    Args:
        padding_mask: bool [B, S], True for tokens that are not padding; None: all.
        kind: "mean", "first" or "last".
    """
    return mean_pool(x, padding_mask) if kind == "mean" else pool_token(x, padding_mask, last=kind == "last")


class Classifier(nn.Module):
    """Predicts one label per sequence."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.embedding = TokenEmbedding(cfg, cfg.known("vocab_size"))
        self.input = InputEmbedding(cfg)
        self.encoder = Encoder(cfg, cfg.encoder_layers)
        if cfg.pooler:
            self.pooler = Linear(cfg, ((axes.EMBED, cfg.dim),), ((axes.MLP, cfg.dim),), use_bias=True)
        self.head = OutputHead(cfg, axes.CLASSES, cfg.known("num_classes"), use_bias=True)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        padding_mask: jax.Array | None = None,
        types: jax.Array | None = None,
        right_padded: bool = False,
        train: bool = False,
    ) -> jax.Array:
        """Computes logits: tokens int [B, S] -> float32 [B, classes].

        Args:
            padding_mask: bool [B, S], True for tokens that are not padding; None: all. Padding has no position.
            types: int [B, S], token types (such as first or second sentence), if `cfg.token_types` is not 0; None: 0.
            right_padded: padding is only at the end of each row, so that sorting is skipped.
        """
        rows = PaddingLast(padding_mask, right_padded=right_padded)
        tokens, padding_mask, types = rows.sort(tokens), rows.sort(padding_mask), rows.sort(types)
        return self._logits(self.encode(tokens, padding_mask, types, train=train), padding_mask)

    def lens(self, stream: jax.Array, padding_mask: jax.Array | None) -> jax.Array:
        """Computes float32 logits [B, classes] from the residual stream [B, S, D] after any layer (the logit lens)."""
        return self._logits(self.encoder.finish(stream), padding_mask)

    def _logits(self, x: jax.Array, padding_mask: jax.Array | None) -> jax.Array:
        pooled = pool(x, padding_mask, self.cfg.pooling)
        return self.head(jnp.tanh(self.pooler(pooled)) if self.cfg.pooler else pooled)

    def encode(
        self,
        tokens: jax.Array,
        padding_mask: jax.Array | None,
        types: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """Encodes tokens int [B, S], with padding only at the end of each row -> [B, S, D]."""
        return self.encoder(self.input(self.embedding(tokens), types=types, train=train), padding_mask, train=train)
