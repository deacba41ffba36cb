import jax
from flax import linen as nn

from tformer_jax.config import kinds
from tformer_jax.nn.norms import Norm
from tformer_jax.nn.sharding import named


class ScaleNorm(Norm):
    """`g x / sqrt(|x|^2 + eps)` ("Transformers without Tears", 2019)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        g = self.param("scale", named(nn.initializers.ones, self.axis), (1,))
        return (g * x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + self.cfg.norm_eps)).astype(x.dtype)


kinds.NORMS["scalenorm"] = ScaleNorm
