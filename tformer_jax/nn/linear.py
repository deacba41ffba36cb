"""Linear layers whose input and output may have several axes, such as D -> (N, H)."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.nn import quantized
from tformer_jax.nn.gathered import Names, with_gathered
from tformer_jax.nn.module import Module
from tformer_jax.nn.sharding import mesh_axes, named, platform
from tformer_jax.nn.xla import as_rows, matrix_product, product_over_rows, with_transposed_gradient

ALIGNED, ALIGNED_ROWS = 64, 512
"""On a GPU, columns of a product are padded to a multiple of `ALIGNED` if it has at least `ALIGNED_ROWS` rows.

With GPT-2's 50,257 columns, which are odd, a step in bfloat16 took 50.4 ms on an H200, and 36.1 ms with aligned columns
and bfloat16 operands of the gradients. With fewer rows, reading the matrix determines the time.
"""
BFLOAT16_PRECISIONS = ("bfloat16", "BF16_BF16_F32")
"""JAX's names of the matmul precision with operands of bfloat16, summed in float32."""
LOW_RANK = "low_rank"
"""Collection of updates of kernels: A [*inputs, r] and B [r, *outputs]; the layer uses W + A B as its kernel W."""


def kernel_initializer(cfg: ModelConfig, fan_in: int, fan_out: int, factor: float = 1.0) -> nn.initializers.Initializer:
    """Returns the initializer that `cfg.initializer` names, scaled by `factor`.

    `xavier`: uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010); `fan_in`: N(0, 1 / fan_in);
    `normal`: N(0, cfg.init_std^2).
    """
    if cfg.initializer == "xavier":
        bound = factor * math.sqrt(6 / (fan_in + fan_out))
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
    std = cfg.init_std if cfg.initializer == "normal" else fan_in**-0.5
    return nn.initializers.normal(factor * std)


def residual_factor(cfg: ModelConfig, path: tuple[str, ...]) -> float:
    """Returns `1 / sqrt(sub-layers of the stack)` with `cfg.scale_residual_init`, otherwise 1.

    Scales the initial output kernels of sub-layers, so that the sum of all sub-layers does not grow with depth
    ("Language Models are Unsupervised Multitask Learners", 2019, section 2.3). The kernel's `path` distinguishes
    encoder and decoder; the decoder of a seq2seq model has three sub-layers per layer.
    """
    if not cfg.scale_residual_init:
        return 1.0
    of_decoder = 3 if cfg.model_class.reads_source else 2
    sublayers = 2 * cfg.encoder_layers if "encoder" in path else of_decoder * cfg.decoder_layers
    return 1 / math.sqrt(sublayers)


def hidden_factor(cfg: ModelConfig) -> float:
    """Returns `width_factor^-0.5` for `normal` kernels, else 1: other initializers depend on the width already."""
    return cfg.width_factor**-0.5 if cfg.initializer == "normal" else 1.0


def query_factor(cfg: ModelConfig) -> float:
    """Returns `1 / (attention_scale sqrt(cfg.score_size))`, or 1 without `cfg.attention_scale`.

    Scales the initial query kernels, as in T5, so that scores start as with the default scale. It is also 1 for
    `normal` kernels, which start with `cfg.init_std` as in GPT-2.
    """
    if cfg.attention_scale is None or cfg.initializer == "normal":
        return 1.0
    return 1 / (cfg.attention_scale * math.sqrt(cfg.score_size))


def product(x: jax.Array, matrix: jax.Array, names: Names, *, contracted: int = 0, dtype: Any = None) -> jax.Array:
    """Computes x [..., I] times a matrix, summed over the matrix's axis `contracted` of size I: [..., O].

    Both are rounded to `operand_dtype(x.dtype)`. The matrix's gradient is summed in its own dtype, over devices too.

    Args:
        names: logical names of the matrix's axes; one must be the model width.
        dtype: dtype of the result; None: the dtype of x.
    """
    multiply = functools.partial(_multiply, contracted, dtype)
    out = with_gathered(multiply, as_rows(x), matrix, names, dtype=x.dtype)
    return out.reshape(*x.shape[:-1], matrix.shape[1 - contracted])


def aligned_product(
    x: jax.Array, matrix: jax.Array, names: Names, *, contracted: int = 0, dtype: Any = None
) -> jax.Array:
    """Computes `product`; on a GPU, pads the outputs with zeros to a multiple of `ALIGNED` and drops the padding."""
    outputs = 1 - contracted
    (name, size), widths = (names[outputs], matrix.shape[outputs]), [(0, 0), (0, 0)]
    sharded = name is not None and mesh_axes(name, size)
    if platform() == "gpu" and math.prod(x.shape[:-1]) >= ALIGNED_ROWS and not sharded:
        widths[outputs] = (0, -size % ALIGNED)
    return product(x, jnp.pad(matrix, widths), names, contracted=contracted, dtype=dtype)[..., :size]


class _Dtypes(NamedTuple):
    """Dtypes of a product and of its gradients."""

    operands: Any
    result: Any
    dx: Any
    d_matrix: Any


def _multiply(contracted: int, dtype: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    dtypes = _Dtypes(operand_dtype(x.dtype), x.dtype if dtype is None else dtype, x.dtype, matrix.dtype)
    if x.dtype == matrix.dtype == dtypes.result and dtypes.operands != jnp.bfloat16:
        return matrix_product(x, with_transposed_gradient(matrix), contracted, dtypes.result)
    return _rounded_product(contracted, dtypes, x, matrix)


def operand_dtype(dtype: Any) -> Any:
    """Returns the dtype of operands in products of `dtype`: the same, or on a CPU the one of JAX's matmul precision.

    XLA for CPUs ignores this precision. With it, train steps on an Intel Xeon with AMX are 1.5 to 1.9 times as fast
    (configs/results/benchmarks/train_intel_bfloat16.json).
    """
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    rounds = dtype == jnp.float32 and precision in BFLOAT16_PRECISIONS and platform() == "cpu"
    return jnp.dtype(jnp.bfloat16 if rounds else dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded_product(contracted: int, dtypes: _Dtypes, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Computes `matrix_product` of rounded operands.

    Products of the backward pass also round their operands; their results have the dtypes of x and of the matrix.
    Products of a float32 and a bfloat16 operand have the speed of float32.
    """
    return _forward(contracted, dtypes, x, matrix)[0]


def _forward(
    contracted: int, dtypes: _Dtypes, x: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, matrix = x.astype(dtypes.operands), matrix.astype(dtypes.operands)
    return matrix_product(x, matrix, contracted, dtypes.result), (x, matrix)


def _backward(
    contracted: int, dtypes: _Dtypes, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, matrix = saved
    gradient = gradient.astype(dtypes.operands)
    sides = (x, gradient) if contracted == 0 else (gradient, x)
    dx = matrix_product(gradient, matrix, 1 - contracted, dtypes.dx)
    return dx, product_over_rows(*sides, dtypes.d_matrix)


_rounded_product.defvjp(_forward, _backward)


def low_rank_product(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes `x A B`, [..., I] -> [..., O], with A [I, r] and B [r, O]; the matrix A B is never formed."""
    rows = _multiply(0, None, _multiply(0, None, as_rows(x), a), b)
    return rows.reshape(*x.shape[:-1], b.shape[1])


def _merged_name(merged: tuple[tuple[str, int], ...]) -> str | None:
    """Returns the name of an axis merged from several, which is sharded as the first of them."""
    name, size = merged[0]
    return name if name == axes.EMBED or mesh_axes(name, size) else None


def broadcast_like(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcasts a parameter to the shape and dtype of x; its gradient is summed in float32.

    A sum of ones in bfloat16 ends at 256.
    """
    return jnp.broadcast_to(parameter.astype(jnp.float32), x.shape).astype(x.dtype)


class Linear(Module):
    """Computes `y = x W + b` from the axes `inputs` to the axes `outputs`, each a tuple of (logical name, size).

    With factors in the collection `LOW_RANK`, it is `y = x W + (x A) B + b`.
    """

    cfg: ModelConfig
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    use_bias: bool
    ends_sublayer: bool = False
    parts: tuple[tuple[int, float], ...] = ()
    """Layers that share the kernel: the size of each on the first output axis, and the factor of its initial values."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer: [..., *input sizes] -> [..., *output sizes] in the computation dtype.

        Raises:
            UserError: the last axes of x do not have the input sizes.
        """
        (in_names, in_shape), (out_names, out_shape) = zip(*self.inputs, strict=True), zip(*self.outputs, strict=True)
        if x.shape[-len(in_shape) :] != in_shape:
            raise UserError(f"{'/'.join(self.path)}: x has the shape {x.shape}, but its last axes must be {in_shape}")
        fan_in, fan_out = math.prod(in_shape), math.prod(out_shape)
        param_dtype = jnp.dtype(self.cfg.param_dtype)
        init = named(self._initializer(fan_in, out_shape), *in_names, *out_names)
        kernel = self.param("kernel", init, (*in_shape, *out_shape), param_dtype)
        lead, names = x.shape[: x.ndim - len(in_shape)], (_merged_name(self.inputs), _merged_name(self.outputs))
        matrix = kernel.astype(self.cfg.gradient_dtype).reshape(fan_in, fan_out)
        x = x.astype(self.cfg.dtype).reshape(*lead, fan_in)
        y = self._product(x, matrix, names)
        if self.has_variable(LOW_RANK, "kernel"):
            factors: Any = self.get_variable(LOW_RANK, "kernel")
            y = y + low_rank_product(x, factors["a"].reshape(fan_in, -1), factors["b"].reshape(-1, fan_out))
        y = y.reshape(*lead, *out_shape)
        if self.use_bias:
            zeros = named(nn.initializers.zeros, *out_names)
            y = y + broadcast_like(self.param("bias", zeros, out_shape, param_dtype), y)
        return y

    @nn.nowrap
    def _initializer(self, fan_in: int, out_shape: tuple[int, ...]) -> nn.initializers.Initializer:
        scale = hidden_factor(self.cfg) * (residual_factor(self.cfg, self.path) if self.ends_sublayer else 1.0)
        parts, rest = self.parts or ((out_shape[0], 1.0),), out_shape[1:]

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            inputs, drawn = shape[: -len(out_shape)], []
            keys = jax.random.split(key, len(parts)) if len(parts) > 1 else [key]
            for part_key, (size, factor) in zip(keys, parts, strict=True):
                draw = kernel_initializer(self.cfg, fan_in, size * math.prod(rest), scale * factor)
                drawn.append(draw(part_key, (*inputs, size, *rest), dtype))
            return jnp.concatenate(drawn, axis=len(inputs))

        return init

    @nn.nowrap
    def _product(self, x: jax.Array, matrix: Any, names: Names) -> jax.Array:
        """Computes `product`, rounded as `cfg.quantization` says; the matrix may be stored as int8."""
        if quantized.is_quantized(matrix):
            if self.cfg.quantization == "int8":
                return quantized.integer_product(x, matrix)
            # the backward pass converts the matrix again instead of keeping it
            return jax.checkpoint(lambda x, stored: product(x, quantized.dequantize(stored), names))(x, matrix)
        if self.cfg.quantization is not None:
            matrix = quantized.rounded(matrix, range(1, 2))
        if self.cfg.quantization == "int8":
            x = quantized.rounded(x, range(x.ndim - 1))
        return product(x, matrix, names)
