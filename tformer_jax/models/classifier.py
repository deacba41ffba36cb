"""Sequence classifier: an encoder, pooling of its outputs, and one logit per class."""

from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax import axes
from tformer_jax.models.token_encoder import TokenEncoder
from tformer_jax.nn.embeddings import OutputHead
from tformer_jax.nn.linear import Linear


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
    """Pools x [B, S, D] over the tokens that are not padding: [B, D], for "mean" float32, else of x's dtype.

    Args:
        padding_mask: bool [B, S], True for tokens that are not padding; None: all.
        kind: "mean", "first" or "last".
    """
    return mean_pool(x, padding_mask) if kind == "mean" else pool_token(x, padding_mask, last=kind == "last")


class Classifier(TokenEncoder):
    """Predicts one label per sequence."""

    labels = "label"
    classifies = True

    def setup(self) -> None:
        super().setup()
        cfg = self.cfg
        if cfg.pooler:
            self.pooler = Linear(cfg, ((axes.EMBED, cfg.dim),), ((axes.MLP, cfg.dim),), use_bias=True)
        self.head = OutputHead(self.head_cfg, axes.CLASSES, cfg.size("num_classes"), use_bias=True)

    def __call__(self, tokens: jax.Array, padding_mask: jax.Array | None = None, **options: Any) -> jax.Array:
        """Computes logits: tokens int [B, S] -> float32 [B, classes]; arguments as for `features`."""
        return self._logits(self.features(tokens, padding_mask, **options), padding_mask)

    def lens(self, stream: jax.Array, padding_mask: jax.Array | None) -> jax.Array:
        """Computes float32 logits [B, classes] from the residual stream [B, S, D] after any layer (the logit lens)."""
        return self._logits(self.encoder.finish(stream), padding_mask)

    def _logits(self, x: jax.Array, padding_mask: jax.Array | None) -> jax.Array:
        pooled = pool(x, padding_mask, self.cfg.pooling)
        if self.cfg.pooler:
            pooled = getattr(jax.nn, self.cfg.pooler_activation)(self.pooler(pooled))
        return self.head(self.transformed(pooled))
