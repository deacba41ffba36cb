"""Position-wise feed-forward networks."""

import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.dropout import Dropout
from tformer_jax.nn.linear import Linear
from tformer_jax.nn.sharding import constrain


class FFN(nn.Module):
    """`activation(x W1 + b1) W2 + b2` ("Attention Is All You Need", 2017, section 3.3)."""

    cfg: ModelConfig
    width: int | None = None
    """F; None: `cfg.ffn_dim`."""

    def setup(self) -> None:
        cfg = self.cfg
        embed, hidden = ((axes.EMBED, cfg.dim),), ((axes.MLP, self.width or cfg.ffn_dim),)
        self.expand = Linear(cfg, embed, hidden, cfg.ffn_bias)
        self.contract = Linear(cfg, hidden, embed, cfg.ffn_bias, ends_sublayer=True)
        self.dropout = Dropout(cfg.ffn_dropout)

    def __call__(self, x: jax.Array, *, train: bool = False, **_: jax.Array | None) -> jax.Array:
        """Applies the FFN to each token, [B, T, D] -> [B, T, D]; ignores the other arguments of mixtures of experts."""
        hidden = constrain(self.hidden(x), axes.BATCH, axes.LENGTH, axes.MLP)
        return self.contract(self.dropout(hidden, train=train))

    def hidden(self, x: jax.Array) -> jax.Array:
        """Computes the hidden features: [..., D] -> [..., F]."""
        activation = kinds.load(kinds.ACTIVATIONS, self.cfg.activation)
        return activation(self.expand(x))


class GatedFFN(FFN):
    """`(activation(x Wg + bg) * (x W1 + b1)) W2 + b2` ("GLU Variants Improve Transformer", 2020).

    GLU with `sigmoid`, ReGLU with `relu`, GEGLU with `gelu` (or `gelu_tanh`), SwiGLU with `silu`.
    """

    def setup(self) -> None:
        super().setup()
        cfg = self.cfg
        hidden = ((axes.MLP, self.width or cfg.ffn_dim),)
        self.gate = Linear(cfg, ((axes.EMBED, cfg.dim),), hidden, cfg.ffn_bias)

    def hidden(self, x: jax.Array) -> jax.Array:
        """Computes the hidden features: [..., D] -> [..., F]."""
        activation = kinds.load(kinds.ACTIVATIONS, self.cfg.activation)
        return activation(self.gate(x)) * self.expand(x)


def make_ffn(cfg: ModelConfig, *, experts: bool = True) -> nn.Module:
    """Builds the FFN that `cfg.ffn` names; without `experts`, the dense FFN of a model with experts."""
    if cfg.uses_experts and not experts:
        return make_dense(cfg, cfg.moe.dense_dim)
    ffn: nn.Module = kinds.load(kinds.FFNS, cfg.ffn)(cfg)
    return ffn


def make_dense(cfg: ModelConfig, width: int | None, name: str | None = None) -> nn.Module:
    """Builds an FFN of one expert's kind."""
    ffn: nn.Module = kinds.load(kinds.FFNS, "gated" if cfg.moe.expert_gated else "mlp")(cfg, width, name=name)
    return ffn
