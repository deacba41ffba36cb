"""`jax.nn.dot_product_attention`: fused by XLA anywhere, or by cuDNN on NVIDIA GPUs."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops.core import Backend, Bias, Scoring
from tformer_jax.nn.attention_ops.reference import dense_bias, zero_hidden_rows
from tformer_jax.nn.masks import Mask


def dot_product(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    bias: Bias | None,
    scoring: Scoring,
    dropout_key: None,
    *,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """JAX's own function, with zeros where a query sees nothing.

    Causal masks and their windows are named to it, which saves cuDNN the hidden blocks; a dense mask holds the rest.
    """
    T, S = q.shape[1], k.shape[1]
    causal = mask.causal and mask.prefix is None and mask.positions is None
    window = (mask.window - 1, 0) if causal and mask.window is not None else None
    may_attend = dataclasses.replace(mask, causal=False, window=None).dense(T, S) if causal else mask.dense(T, S)
    if may_attend is not None and implementation == "cudnn":  # which takes no mask that is broadcast along T
        may_attend = jnp.broadcast_to(may_attend, (*may_attend.shape[:2], T, S))
    added = dense_bias(bias, mask, T, S)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=None if added is None else added.astype(q.dtype),
        mask=may_attend,
        is_causal=causal,
        local_window_size=window,
        scale=scoring.scale,
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
)
