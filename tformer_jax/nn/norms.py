"""Normalisation over the model width, with float32 statistics."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.parameters import named


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """`(x - mean) / sqrt(var + eps) * scale + bias` over the last axis ("Layer Normalization", 2016).

    `var` is the biased variance. Statistics are float32, the result has the dtype of x.
    """
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    centred = x32 - mean
    variance = (centred * centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis ("Root Mean Square Layer Normalization", 2019).

    The mean is float32, the result has the dtype of x.
    """
    x32 = x.astype(jnp.float32)
    mean_square = (x32 * x32).mean(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nn.Module):
    """`layer_norm` with a learned scale and, where `cfg.norm_bias`, a learned shift."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        shape, dtype = (x.shape[-1],), jnp.dtype(self.cfg.param_dtype)
        scale = self.param("scale", named(nn.initializers.ones, axes.EMBED), shape, dtype)
        bias = None
        if self.cfg.norm_bias:
            bias = self.param("bias", named(nn.initializers.zeros, axes.EMBED), shape, dtype)
        return layer_norm(x, scale, bias, self.cfg.norm_eps)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        ones = named(nn.initializers.ones, axes.EMBED)
        scale = self.param("scale", ones, (x.shape[-1],), jnp.dtype(self.cfg.param_dtype))
        return rms_norm(x, scale, self.cfg.norm_eps)


NORMS: dict[str, type[nn.Module]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(cfg: ModelConfig, name: str | None = None) -> nn.Module:
    """The norm that `cfg.norm` names."""
    return NORMS[cfg.norm](cfg, name=name)
