"""`jax.nn.dot_product_attention`: fused by XLA anywhere, or by cuDNN on NVIDIA GPUs."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops import shards
from tformer_jax.nn.attention_ops.core import Backend, Operands
from tformer_jax.nn.attention_ops.reference import block_bias, zero_masked_rows


def dot_product(x: Operands, *, implementation: Literal["xla", "cudnn"]) -> jax.Array:
    """Calls `jax.nn.dot_product_attention`, with zeros for queries that may attend to no key.

    Causal masks and their windows are passed as arguments, so that cuDNN skips masked blocks; other conditions are
    passed as an array, except padding that a causal mask hides, so that results of padding queries are unspecified.
    """
    if implementation == "cudnn":  # JAX partitions the kernel only if q, k and v are sharded in the same way
        x = shards.shard_as_queries(x)
    mask, T, S = x.mask.without_hidden_padding, x.q.shape[1], x.k.shape[1]
    causal = mask.causal and mask.prefix is None and mask.positions is None
    window = (mask.window - 1, 0) if causal and mask.window is not None else None
    may_attend = dataclasses.replace(mask, causal=False, window=None).dense(T, S) if causal else mask.dense(T, S)
    if may_attend is not None and implementation == "cudnn":  # cuDNN does not broadcast masks along T
        may_attend = jnp.broadcast_to(may_attend, (*may_attend.shape[:2], T, S))
    added = None if x.bias is None else block_bias(x.bias, mask, 0, T, 0, S)
    if added is not None and implementation == "cudnn":  # cuDNN needs the dtype of q
        added = added.astype(x.q.dtype)
    out = jax.nn.dot_product_attention(
        x.q,
        x.k,
        x.v,
        bias=added,
        mask=may_attend,
        is_causal=causal,
        local_window_size=window,
        scale=x.scoring.scale,
        implementation=implementation,
    )
    return zero_masked_rows(out, mask, S)


def _cudnn_head_limit() -> int:
    """Returns cuDNN's largest head size: 128 on GPUs before Hopper (compute capability 9.0), 256 on later ones."""
    return 256 if float(getattr(jax.local_devices()[0], "compute_capability", 9.0)) >= 9 else 128


XLA = Backend(functools.partial(dot_product, implementation="xla"), softcap=False, dropout=False)
CUDNN = Backend(
    functools.partial(dot_product, implementation="cudnn"),
    platforms=("gpu",),
    softcap=False,
    dropout=False,
    dtypes=("bfloat16",),
    head_multiple=8,
    head_limit=_cudnn_head_limit,
)
