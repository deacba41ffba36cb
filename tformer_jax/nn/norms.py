"""Normalization over the last axis, with float32 statistics.

The gradients are written out, so that the backward pass needs x and one or two statistics per row, but no other arrays
of the size of x.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.module import Module
from tformer_jax.nn.sharding import named


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """Computes `(x - mean) / sqrt(var + eps) * scale + bias` over the last axis ("Layer Normalization", 2016).

    `var` is the biased variance. Statistics are float32; the result has the dtype of x.
    """
    return _layer_norm_forward(x, scale, bias, eps)[0]


def _layer_norm_forward(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> tuple[jax.Array, tuple]:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    centered = x32 - mean
    inverse = jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + eps)
    y = centered * inverse * scale.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _layer_norm_backward(eps: float, residuals: tuple, dy: jax.Array) -> tuple:
    """With `n = (x - mean) / sqrt(var + eps)` and `g = dy * scale`: `dx = (g - mean(g) - n mean(g n)) / sqrt(...)`."""
    x, scale, bias, mean, inverse = residuals
    normal, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    g = dy * scale.astype(jnp.float32)
    dx = inverse * (g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True))
    d_bias = None if bias is None else _sum_rows(dy).astype(bias.dtype)
    return dx.astype(x.dtype), _sum_rows(dy * normal).astype(scale.dtype), d_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Computes `x / sqrt(mean(x^2) + eps) * scale` over the last axis ("Root Mean Square Layer Normalization", 2019).

    The mean is float32; the result has the dtype of x.
    """
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, tuple]:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + eps)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(eps: float, residuals: tuple, dy: jax.Array) -> tuple:
    """Computes the gradients as `_layer_norm_backward` does, without the means of x and g."""
    x, scale, inverse = residuals
    normal, dy = x.astype(jnp.float32) * inverse, dy.astype(jnp.float32)
    g = dy * scale.astype(jnp.float32)
    dx = inverse * (g - normal * (g * normal).mean(-1, keepdims=True))
    return dx.astype(x.dtype), _sum_rows(dy * normal).astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _sum_rows(x: jax.Array) -> jax.Array:
    """Sums over all axes but the last: [..., D] -> [D]."""
    return x.sum(axis=tuple(range(x.ndim - 1)))


class Norm(Module):
    """Base class of normalization over the last axis."""

    cfg: ModelConfig
    axis: str = axes.EMBED

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes [..., D] -> [..., D]."""
        raise NotImplementedError

    def scale(self, size: int) -> jax.Array:
        """Returns the learned scale [size]; with `cfg.norm_unit_offset` the parameter is `scale - 1` ("Gemma")."""
        initializer = nn.initializers.zeros if self.cfg.norm_unit_offset else nn.initializers.ones
        scale = self.param("scale", named(initializer, self.axis), (size,), jnp.dtype(self.cfg.param_dtype))
        return 1 + scale.astype(jnp.float32) if self.cfg.norm_unit_offset else scale


class LayerNorm(Norm):
    """Layer normalization with a learned scale and, with `cfg.norm_bias`, a learned bias."""

    settings: ClassVar[tuple[str, ...]] = ("norm_bias",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes [..., D] -> [..., D]."""
        scale, bias = self.scale(x.shape[-1]), None
        if self.cfg.norm_bias:
            zeros = named(nn.initializers.zeros, self.axis)
            bias = self.param("bias", zeros, (x.shape[-1],), jnp.dtype(self.cfg.param_dtype))
        return layer_norm(x, scale, bias, self.cfg.norm_eps)


class RMSNorm(Norm):
    """RMS normalization with a learned scale."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes [..., D] -> [..., D]."""
        return rms_norm(x, self.scale(x.shape[-1]), self.cfg.norm_eps)


def make_norm(cfg: ModelConfig, axis: str = axes.EMBED) -> Norm:
    """Builds the norm that `cfg.norm` names, over the logical axis `axis`."""
    norm: Norm = kinds.load(kinds.NORMS, cfg.norm)(cfg, axis)
    return norm
