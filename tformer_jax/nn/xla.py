"""CPU tuning of computations: forms that XLA compiles to faster programs for CPUs; and workarounds of its faults.

Measured on two AMD EPYC cores, unless a function says otherwise. What needs no JAX is in `base.cpu` and
`base.workarounds`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax import axes
from tformer_jax.nn.sharding import mesh_axes, platform

QUERY_CHUNKS, SMALLEST_QUERY_CHUNK = 4, 32
"""Maximum number of chunks per call of attention, and minimum number of queries per chunk."""
BLOCK = 64
"""Block size of `top_k`."""
MAX_UNBLOCKED = 512
"""Maximum number of values that `top_k` searches without blocks."""


def query_chunk(T: int) -> int:
    """Returns the number of queries that attention processes at once: T; on a CPU fewer, so that chunks skip keys.

    Forward and backward passes of causal attention take 1.2 times as long in one piece for T = 128, 1.3 times for 256,
    and 1.7 times for 512 (8 heads of 64 features, 2,048 tokens). Other devices are unmeasured.
    """
    return max(-(-T // QUERY_CHUNKS), SMALLEST_QUERY_CHUNK) if platform() == "cpu" else T


def as_rows(x: jax.Array) -> jax.Array:
    """Reshapes [..., I] -> [rows, I] for faster products, unless the mesh shards the sequence axis.

    With several leading axes, XLA for CPUs computes the gradient of a kernel from transposed copies of x and of the
    output's gradient, and recomputes in them all that they depend on. A sharded sequence axis is not merged with the
    batch axis, because one axis cannot be split both ways.
    """
    return x if mesh_axes(axes.LENGTH) else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def with_transposed_gradient(matrix: jax.Array) -> jax.Array:
    """Returns the matrix; on CPUs, the gradient of one with more rows than columns is computed as `(g^T x)^T`.

    The gradient of a kernel W [I, O] is `x^T g`, in which XLA for CPUs reads x in strides. If I > O, the strided
    operand of its transpose, `g^T x`, is narrower: 15 to 19 % faster for 3072 x 512 x 256 and 2048 x 1536 x 384.
    Without the barrier, XLA would merge the two transpositions. Other devices are unmeasured.
    """
    rows, columns = matrix.shape
    return _transposed_gradient(matrix) if rows > columns and platform() == "cpu" else matrix


@jax.custom_jvp
def _transposed_gradient(matrix: jax.Array) -> jax.Array:
    return matrix


_transposed_gradient.defjvp(
    lambda matrices, tangents: (*matrices, jax.lax.optimization_barrier(tangents[0].T).T),
)


def matrix_product(x: jax.Array, matrix: jax.Array, contracted: int, dtype: Any) -> jax.Array:
    """Computes x [..., I] times a matrix, summed over the matrix's axis `contracted` of size I: [..., O] in `dtype`.

    XLA for CPUs converts bfloat16 operands to float32, unless the result is float32. With such a result, it uses
    AVX512-BF16 or AMX, but fails if it transposes the product later ("Unsupported element type for DotThunk", jaxlib
    0.10), which the barrier prevents.
    """
    dimensions = ((x.ndim - 1,), (contracted,)), ((), ())
    if not _is_bfloat16_on_cpu(x):
        return jax.lax.dot_general(x, matrix, dimensions, preferred_element_type=dtype)
    out = jax.lax.dot_general(x, matrix, dimensions, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(out).astype(dtype)


def product_over_rows(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Sums the outer products of the rows of x [..., I] and y [..., O] over all leading axes: [I, O] in `dtype`.

    XLA for CPUs also converts bfloat16 operands to float32 if it reads x in strides. With a transposed copy, a product
    is 1.5 to 2.6 times as fast (two cores of an Intel Xeon with AMX). The copy has a leading axis of 1, because XLA
    decides by the layout that the operand has before layouts are assigned. Products with results in bfloat16 are left
    alone: with sums in float32, devices would add float32, too.
    """
    if _is_bfloat16_on_cpu(x) and x.ndim == 2 and dtype == jnp.float32:
        return matrix_product(jax.lax.optimization_barrier(x.T[None])[0], y, 0, dtype)
    rows = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, y, ((rows, rows), ((), ())), preferred_element_type=dtype)


def _is_bfloat16_on_cpu(x: jax.Array) -> bool:
    return x.dtype == jnp.bfloat16 and platform() == "cpu"


def decodes_from_copy() -> bool:
    """Returns whether decoding keeps a second copy of the parameters, with fused projections and an untied output head.

    On CPUs, a step of 32 rows is 11 % faster with both, and one row 7 % (6 layers of width 512, vocabulary of 16,000).
    Other devices are unmeasured.
    """
    return jax.default_backend() == "cpu"


def isolated_top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the results of `jax.lax.top_k`, behind a barrier.

    Without it, XLA sorts all values where only a part of the results is used (openxla/xla#25487, jaxlib 0.10). The
    third operand keeps the barrier from directly following the top-k, where XLA's partitioned top-k on a mesh fails.
    """
    largest, indices, _ = jax.lax.optimization_barrier((*jax.lax.top_k(values, k), jnp.zeros(())))
    return largest, indices


def top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest values along the last axis and their indices, like `jax.lax.top_k`, but faster.

    Values are in descending order, equal values in order of their indices. Only the k blocks with the largest maxima
    are searched, because no value of another block exceeds any of these k maxima.

    Args:
        values: float [..., V], which may contain -inf.
        k: at most V.

    Returns:
        Values [..., k], of the dtype of `values`, and indices, int32 [..., k].
    """
    *leading, V = values.shape
    blocks = -(-V // BLOCK)
    if V <= MAX_UNBLOCKED or blocks <= k:
        return isolated_top_k(values, k)
    missing = [(0, 0)] * len(leading) + [(0, blocks * BLOCK - V)]
    maxima = jnp.pad(values, missing, constant_values=-jnp.inf).reshape(*leading, blocks, BLOCK).max(axis=-1)
    chosen = jnp.sort(top_k(maxima, k)[1], axis=-1)
    members = (chosen[..., None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(*leading, k * BLOCK)
    block_values = jnp.take_along_axis(values, jnp.minimum(members, V - 1), axis=-1)
    largest, order = top_k(jnp.where(members < V, block_values, -jnp.inf), k)
    return largest, jnp.take_along_axis(members, order, axis=-1)


def most_probable(logits: jax.Array) -> jax.Array:
    """Returns the index of the largest logit, the first one if several are equal: [..., V] -> int32 [...]."""
    return top_k(logits, 1)[1][..., 0]
