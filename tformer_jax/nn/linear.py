"""Affine maps whose input and output may have several axes, such as D -> (N, H)."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax.config import ModelConfig
from tformer_jax.nn.parameters import named


def kernel_initializer(cfg: ModelConfig, fan_in: int, fan_out: int) -> nn.initializers.Initializer:
    """`xavier`: uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010); `normal`: N(0, cfg.init_std)."""
    if cfg.initializer == "normal":
        return nn.initializers.normal(cfg.init_std)
    bound = math.sqrt(6 / (fan_in + fan_out))
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nn.Module):
    """`y = x W + b`, from the axes `inputs` to the axes `outputs`, each a tuple of (logical name, size)."""

    cfg: ModelConfig
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    use_bias: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input sizes] -> [..., *output sizes] in the computation dtype."""
        (in_names, in_shape), (out_names, out_shape) = zip(*self.inputs, strict=True), zip(*self.outputs, strict=True)
        fan_in, fan_out = math.prod(in_shape), math.prod(out_shape)
        dtype, param_dtype = jnp.dtype(self.cfg.dtype), jnp.dtype(self.cfg.param_dtype)
        init = named(kernel_initializer(self.cfg, fan_in, fan_out), *in_names, *out_names)
        kernel = self.param("kernel", init, (*in_shape, *out_shape), param_dtype)
        lead = x.shape[: x.ndim - len(in_shape)]
        y = x.astype(dtype).reshape(*lead, fan_in) @ kernel.astype(dtype).reshape(fan_in, fan_out)
        y = y.reshape(*lead, *out_shape)
        if self.use_bias:
            zeros = named(nn.initializers.zeros, *out_names)
            y = y + self.param("bias", zeros, out_shape, param_dtype).astype(dtype)
        return y
