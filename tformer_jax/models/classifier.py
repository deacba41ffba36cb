"""The sequence classifier: an encoder, the average of its outputs, and one logit a class."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.embeddings import InputEmbedding, OutputHead, TokenEmbedding
from tformer_jax.nn.stacks import Encoder


def mean_pool(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """The average of x [B, S, D] over real tokens, bool [B, S] (None: all): float32 [B, D]; zeros for none."""
    weights = jnp.ones(x.shape[:2]) if real is None else real.astype(jnp.float32)
    total = jnp.einsum("BSD,BS->BD", x, weights, preferred_element_type=jnp.float32)
    return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1)


class Classifier(nn.Module):
    """One label for a sequence."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.embedding = TokenEmbedding(cfg, cfg.known("vocab_size"))
        self.input = InputEmbedding(cfg)
        self.encoder = Encoder(cfg)
        self.head = OutputHead(cfg, axes.CLASSES, cfg.known("num_classes"), use_bias=True)

    def __call__(self, tokens: jax.Array, *, mask: jax.Array | None = None, train: bool = False) -> jax.Array:
        """tokens int [B, S], real tokens bool [B, S] (None: all) -> float32 logits [B, classes]."""
        x = self.encoder(self.input(self.embedding(tokens), train=train), mask, train=train)
        return self.head(mean_pool(x, mask))
