"""`jax.nn.dot_product_attention`: fused by XLA anywhere, or by cuDNN on NVIDIA GPUs."""

import functools
from typing import Literal

import jax

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
    """JAX's own function, with zeros where a query sees nothing."""
    T, S = q.shape[1], k.shape[1]
    may_attend = mask.dense(T, S)
    added = dense_bias(bias, mask, T, S)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=None if added is None else added.astype(q.dtype),
        mask=may_attend,
        scale=scoring.scale,
        implementation=implementation,
    )
    return zero_hidden_rows(out, may_attend)


XLA = Backend(functools.partial(dot_product, implementation="xla"), softcap=False, dropout=False)
CUDNN = Backend(
    functools.partial(dot_product, implementation="cudnn"),
    platforms=("gpu",),
    softcap=False,
    dropout=False,
    dtypes=("bfloat16",),
)
