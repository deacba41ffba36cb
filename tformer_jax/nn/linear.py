"""Affine maps whose input and output may have several axes, such as D -> (N, H)."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.gathered import with_whole
from tformer_jax.nn.parameters import named
from tformer_jax.nn.sharding import mesh_axes


def kernel_initializer(
    cfg: ModelConfig, fan_in: int, fan_out: int, *, ends_sublayer: bool = False
) -> nn.initializers.Initializer:
    """`xavier`: uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010); `normal`: N(0, cfg.init_std^2).

    With `cfg.scale_residual_init`, a kernel that ends a sub-layer is smaller by 1 / sqrt(2 L), so that the sum of
    all 2 L of them keeps its size ("Language Models are Unsupervised Multitask Learners", 2019, section 2.3).
    """
    layers = cfg.encoder_layers if cfg.family == "classifier" else cfg.decoder_layers
    factor = 1 / math.sqrt(2 * layers) if ends_sublayer and cfg.scale_residual_init else 1.0
    if cfg.initializer == "normal":
        return nn.initializers.normal(factor * cfg.init_std)
    bound = factor * math.sqrt(6 / (fan_in + fan_out))
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def product(x: jax.Array, kernel: jax.Array, width: int, *, dtype: jnp.dtype | None = None) -> jax.Array:
    """`x W`: x [..., I] and kernel [I, O] -> [..., O], accumulated in `dtype` (None: the dtype of x).

    Args:
        width: the axis of the kernel that has the model's width.
    """
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)
    return with_whole(multiply, as_rows(x), kernel, width).reshape(*x.shape[:-1], kernel.shape[1])


def as_rows(x: jax.Array) -> jax.Array:
    """[..., I] -> [rows, I], the form in which products are fastest.

    XLA for CPUs would otherwise compute the gradient of a kernel, which then sums over several axes, from transposed
    copies of x and of the output's gradient, and recompute in them all that they depend on. A mesh that splits the
    sequence keeps its axes apart, because one axis cannot be split both ways.
    """
    return x if mesh_axes(axes.LENGTH) else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Linear(nn.Module):
    """`y = x W + b`, from the axes `inputs` to the axes `outputs`, each a tuple of (logical name, size)."""

    cfg: ModelConfig
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    use_bias: bool
    ends_sublayer: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input sizes] -> [..., *output sizes] in the computation dtype."""
        (in_names, in_shape), (out_names, out_shape) = zip(*self.inputs, strict=True), zip(*self.outputs, strict=True)
        fan_in, fan_out = math.prod(in_shape), math.prod(out_shape)
        dtype, param_dtype = jnp.dtype(self.cfg.dtype), jnp.dtype(self.cfg.param_dtype)
        init = kernel_initializer(self.cfg, fan_in, fan_out, ends_sublayer=self.ends_sublayer)
        kernel = self.param("kernel", named(init, *in_names, *out_names), (*in_shape, *out_shape), param_dtype)
        lead, width = x.shape[: x.ndim - len(in_shape)], 0 if axes.EMBED in in_names else 1
        y = product(x.astype(dtype).reshape(*lead, fan_in), kernel.astype(dtype).reshape(fan_in, fan_out), width)
        y = y.reshape(*lead, *out_shape)
        if self.use_bias:
            zeros = named(nn.initializers.zeros, *out_names)
            y = y + self.param("bias", zeros, out_shape, param_dtype).astype(dtype)
        return y
