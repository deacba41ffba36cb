import jax

from tformer_jax import axes
from tformer_jax.config import kinds
from tformer_jax.nn.attention import Attention
from tformer_jax.nn.linear import Linear


class GatedHeads(Attention):
    """Multiplies the output of each head by `sigmoid(x W + b)`."""

    def setup(self) -> None:
        super().setup()
        inputs, heads = ((axes.EMBED, self.cfg.dim),), ((axes.HEADS, self.cfg.num_heads),)
        self.gate = Linear(self.cfg, inputs, heads, use_bias=True)

    def transform_heads(self, heads: jax.Array, x: jax.Array) -> jax.Array:
        return heads * jax.nn.sigmoid(self.gate(x))[..., None]


kinds.ATTENTIONS["gated_heads"] = GatedHeads
