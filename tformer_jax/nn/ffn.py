"""The position-wise feed-forward network."""

import functools
from collections.abc import Callable

import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.dropout import Dropout
from tformer_jax.nn.linear import Linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


class FFN(nn.Module):
    """`activation(x W1 + b1) W2 + b2` ("Attention Is All You Need", 2017, section 3.3)."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg
        embed, hidden = ((axes.EMBED, cfg.dim),), ((axes.MLP, cfg.ffn_dim),)
        self.expand = Linear(cfg, embed, hidden, cfg.ffn_bias)
        self.contract = Linear(cfg, hidden, embed, cfg.ffn_bias)
        self.dropout = Dropout(cfg.ffn_dropout)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """[..., D] -> [..., D]."""
        hidden = ACTIVATIONS[self.cfg.activation](self.expand(x))
        return self.contract(self.dropout(hidden, train=train))
