"""tokamax's kernels of FlashAttention for GPUs: Mosaic from Hopper on, Triton before (extra `tokamax`).

They are unmeasured here; `python -m tests.programs.gpu_attention` compares them with the other backends on a GPU.
"""

import functools

import jax

from tformer_jax.nn.attention_ops import shards
from tformer_jax.nn.attention_ops.core import Backend, Operands
from tformer_jax.nn.attention_ops.dot_product import mask_arguments
from tformer_jax.nn.attention_ops.reference import zero_masked_rows


def tokamax(x: Operands, *, implementation: str | None = None) -> jax.Array:
    """Calls `tokamax.dot_product_attention` for the rows and heads of each device.

    Args:
        implementation: tokamax's name of a kernel; None: the fastest that supports the device and the inputs.
    """
    return shards.on_each_device(functools.partial(_kernel, implementation=implementation), x)


def _kernel(x: Operands, *, implementation: str | None) -> jax.Array:
    from tokamax import dot_product_attention

    mask, T, S = x.mask.without_hidden_padding, x.q.shape[1], x.k.shape[1]
    scoring = {"scale": x.scoring.scale, "logits_soft_cap": x.scoring.softcap}
    conditions = mask_arguments(mask, T, S)
    out = dot_product_attention(x.q, x.k, x.v, implementation=implementation, **scoring, **conditions)
    return zero_masked_rows(out, mask, S)


# tokamax caps the sum of scores and bias, not the scores alone
TOKAMAX = Backend(tokamax, platforms=("gpu",), bias=False, dropout=False, extra="tokamax")
