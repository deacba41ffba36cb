"""`jax.nn.dot_product_attention`: fused by XLA anywhere, or by cuDNN on NVIDIA GPUs."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops import shards
from tformer_jax.nn.attention_ops.core import Backend, Operands
from tformer_jax.nn.attention_ops.reference import block_bias, zero_masked_rows
from tformer_jax.nn.masks import Mask


def dot_product(x: Operands, *, implementation: Literal["xla", "cudnn"]) -> jax.Array:
    """Calls `jax.nn.dot_product_attention`, with zeros for queries that may attend to no key."""
    if implementation == "cudnn":  # JAX partitions the kernel only if q, k and v are sharded in the same way
        x = shards.shard_as_queries(x)
    mask, T, S = x.mask.without_hidden_padding, x.q.shape[1], x.k.shape[1]
    conditions = mask_arguments(mask, T, S)
    may_attend = conditions["mask"]
    if may_attend is not None and implementation == "cudnn":  # cuDNN does not broadcast masks along T
        conditions["mask"] = jnp.broadcast_to(may_attend, (*may_attend.shape[:2], T, S))
    added = None if x.bias is None else block_bias(x.bias, mask, 0, T, 0, S)
    if added is not None and implementation == "cudnn":  # cuDNN needs the dtype of q
        added = added.astype(x.q.dtype)
    scale = x.scoring.scale
    out = jax.nn.dot_product_attention(
        x.q, x.k, x.v, bias=added, scale=scale, implementation=implementation, **conditions
    )
    return zero_masked_rows(out, mask, S)


def mask_arguments(mask: Mask, T: int, S: int) -> dict[str, Any]:
    """Returns a mask as arguments of `jax.nn.dot_product_attention`.

    Causal masks and their windows are settings, so that kernels skip masked blocks. Other conditions are an array.
    """
    causal = mask.causal and mask.prefix is None and mask.positions is None
    window = (mask.window - 1, 0) if causal and mask.window is not None else None
    others = dataclasses.replace(mask, causal=False, window=None) if causal else mask
    return {"is_causal": causal, "local_window_size": window, "mask": others.dense(T, S)}


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
