"""`jax.nn.dot_product_attention`: fused by XLA anywhere, or by cuDNN on NVIDIA GPUs."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops.core import Backend, Operands
from tformer_jax.nn.attention_ops.reference import dense_bias, zero_hidden_rows


def dot_product(x: Operands, *, implementation: Literal["xla", "cudnn"]) -> jax.Array:
    """JAX's own function, with zeros where a query sees nothing.

    Causal masks and their windows are named to it, which saves cuDNN the hidden blocks; a dense mask holds the rest.
    """
    mask, T, S = x.mask, x.q.shape[1], x.k.shape[1]
    causal = mask.causal and mask.prefix is None and mask.positions is None
    window = (mask.window - 1, 0) if causal and mask.window is not None else None
    may_attend = dataclasses.replace(mask, causal=False, window=None).dense(T, S) if causal else mask.dense(T, S)
    if may_attend is not None and implementation == "cudnn":  # which takes no mask that is broadcast along T
        may_attend = jnp.broadcast_to(may_attend, (*may_attend.shape[:2], T, S))
    added = dense_bias(x.bias, mask, T, S)
    out = jax.nn.dot_product_attention(
        x.q,
        x.k,
        x.v,
        bias=None if added is None else added.astype(x.q.dtype),
        mask=may_attend,
        is_causal=causal,
        local_window_size=window,
        scale=x.scoring.scale,
        implementation=implementation,
    )
    return zero_hidden_rows(out, mask, S)


XLA = Backend(functools.partial(dot_product, implementation="xla"), softcap=False, dropout=False)
CUDNN = Backend(
    functools.partial(dot_product, implementation="cudnn"),
    platforms=("gpu",),
    softcap=False,
    dropout=False,
    dtypes=("bfloat16",),
    head_multiple=8,
    head_limit=256,  # 128 before Hopper
)
