"""Products with int8 kernels, by qwix: rounded in training, stored as int8 for inference.

Each output of a kernel has a scale, and each token of inputs ("Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", 2018). Gradients pass the rounding unchanged.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.base import checks
from tformer_jax.config import ModelConfig

CALIBRATION = f"absmax,{127.5 / 127}"
"""The largest absolute value becomes 127; qwix's 127.5 is rounded to 127 or 128, depending on the compilation."""


def check_installed(cfg: ModelConfig) -> None:
    """Raises `UserError` if `cfg.quantization` is set and qwix is not installed."""
    if cfg.quantization is not None:
        checks.require(f"model.quantization={cfg.quantization!r}", ("qwix",), "quantize")


def is_quantized(parameter: Any) -> bool:
    """Returns whether a parameter is stored as int8."""
    return hasattr(parameter, "qvalue")


def stored_arrays(params: Any) -> Any:
    """Replaces each parameter that is stored as int8 by the array of its integers."""
    return jax.tree.map(lambda leaf: getattr(leaf, "qvalue", leaf), params, is_leaf=is_quantized)


def quantize(x: jax.Array, axes: Sequence[int]) -> Any:
    """Returns x as a `qwix.QArray` of int8 with a scale, in the dtype of x, for each index of `axes`."""
    import qwix

    return qwix.quantize(x, jnp.int8, channelwise_axes=axes, calibration_method=CALIBRATION)


def dequantize(x: Any) -> jax.Array:
    """Returns an int8 array in the dtype of its scales."""
    import qwix

    return qwix.dequantize(x)


def rounded(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns `dequantize(quantize(x, axes))`, with the gradient of x."""
    constant = jax.lax.stop_gradient(x)
    return dequantize(quantize(constant, axes)) + (x - constant)


def integer_product(x: jax.Array, matrix: Any) -> jax.Array:
    """Computes x [..., I] times an int8 matrix [I, O], with x rounded to int8 and sums in int32: [..., O]."""
    import qwix

    rows = quantize(x, range(x.ndim - 1))
    return qwix.dot_general(rows, matrix, (((x.ndim - 1,), (0,)), ((), ()))).astype(x.dtype)
