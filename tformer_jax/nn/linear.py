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


def kernel_initializer(cfg: ModelConfig, fan_in: int, fan_out: int, factor: float = 1.0) -> nn.initializers.Initializer:
    """The distribution that `cfg.initializer` names, times `factor`.

    `xavier`: uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010); `fan_in`: N(0, 1 / fan_in);
    `normal`: N(0, cfg.init_std^2).
    """
    if cfg.initializer == "xavier":
        bound = factor * math.sqrt(6 / (fan_in + fan_out))
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
    std = cfg.init_std if cfg.initializer == "normal" else fan_in**-0.5
    return nn.initializers.normal(factor * std)


def residual_factor(cfg: ModelConfig, path: tuple[str, ...]) -> float:
    """With `cfg.scale_residual_init`, `1 / sqrt(sub-layers of the stack)`, for the kernel at `path` that ends one.

    The sum of all sub-layers then keeps its size ("Language Models are Unsupervised Multitask Learners", 2019, section
    2.3). A stack is an encoder if `path` says so; the decoder of a translator has three sub-layers in each layer.
    """
    if not cfg.scale_residual_init:
        return 1.0
    encoder = cfg.family == "classifier" or "encoder" in path
    sublayers = 2 * cfg.encoder_layers if encoder else (3 if cfg.family == "seq2seq" else 2) * cfg.decoder_layers
    return 1 / math.sqrt(sublayers)


def query_factor(cfg: ModelConfig) -> float:
    """`1 / (attention_scale sqrt(H))` where that is set: scores then start as under the default scale.

    T5 starts its queries this way. `normal` kernels start with `cfg.init_std`, as in GPT-2 and its relatives, and fused
    projections with one distribution for queries, keys and values.
    """
    if cfg.attention_scale is None or cfg.initializer == "normal":
        return 1.0
    return 1 / (cfg.attention_scale * math.sqrt(cfg.head_size))


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
    factor: float = 1.0
    """Of the kernel's start."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input sizes] -> [..., *output sizes] in the computation dtype."""
        (in_names, in_shape), (out_names, out_shape) = zip(*self.inputs, strict=True), zip(*self.outputs, strict=True)
        fan_in, fan_out = math.prod(in_shape), math.prod(out_shape)
        dtype, param_dtype = jnp.dtype(self.cfg.dtype), jnp.dtype(self.cfg.param_dtype)
        factor = self.factor * (residual_factor(self.cfg, self.path) if self.ends_sublayer else 1.0)
        init = kernel_initializer(self.cfg, fan_in, fan_out, factor)
        kernel = self.param("kernel", named(init, *in_names, *out_names), (*in_shape, *out_shape), param_dtype)
        lead, width = x.shape[: x.ndim - len(in_shape)], 0 if axes.EMBED in in_names else 1
        y = product(x.astype(dtype).reshape(*lead, fan_in), kernel.astype(dtype).reshape(fan_in, fan_out), width)
        y = y.reshape(*lead, *out_shape)
        if self.use_bias:
            zeros = named(nn.initializers.zeros, *out_names)
            y = y + self.param("bias", zeros, out_shape, param_dtype).astype(dtype)
        return y
