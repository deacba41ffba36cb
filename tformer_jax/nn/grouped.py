"""Matrix products of rows sorted by group, with one kernel per group."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from tformer_jax.nn.sharding import platform

ROWS = {"cpu": 64, "gpu": 512}
"""Rows per block, by the platform of the mesh; other platforms use `jax.lax.ragged_dot`.

XLA expands `ragged_dot` to a product with every kernel, except on TPUs. 64 was the fastest of 32 to 512 on a CPU; the
choices for GPU and TPU are unmeasured.
"""

Block = Callable[[jax.Array, jax.Array], jax.Array]


@jax.jit
def grouped_product(x: jax.Array, kernels: jax.Array, counts: jax.Array) -> jax.Array:
    """Multiplies each row of x [M, D] by its group's kernel, of [E, D, F] -> [M, F]; the cost depends on M, not E.

    `counts` int32 [E] is the number of rows of each group, in order. Rows after the last group are unspecified. Kernels
    are rounded to the dtype of x, and their gradients are summed in their own dtype, over devices too.
    """
    rows = ROWS.get(platform())
    if rows is None and x.dtype == kernels.dtype:
        return jax.lax.ragged_dot(x, kernels, counts)
    kernels += jax.lax.full_like(x, 0, shape=())  # so that both vary along the same axes inside `jax.shard_map`
    return _ragged_dot(x, kernels, counts) if rows is None else _product(min(rows, len(x)), x, kernels, counts)


@jax.custom_vjp
def _ragged_dot(x: jax.Array, kernels: jax.Array, counts: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, kernels.astype(x.dtype), counts)


def _ragged_forward(x: jax.Array, kernels: jax.Array, counts: jax.Array) -> tuple[jax.Array, tuple]:
    return _ragged_dot(x, kernels, counts), (x, kernels, counts)


def _ragged_backward(residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernels, counts = residuals
    _, pull = jax.vjp(lambda x: jax.lax.ragged_dot(x, kernels.astype(x.dtype), counts), x)
    rows = jax.lax.RaggedDotDimensionNumbers(
        (((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )
    d_kernels = jax.lax.ragged_dot_general(x, d_out, counts, rows, preferred_element_type=jnp.float32)
    return pull(d_out)[0], d_kernels.astype(kernels.dtype), None


_ragged_dot.defvjp(_ragged_forward, _ragged_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(rows: int, x: jax.Array, kernels: jax.Array, counts: jax.Array) -> jax.Array:
    return _times(rows, x, kernels, counts, contracted=1)


def _forward(rows: int, x: jax.Array, kernels: jax.Array, counts: jax.Array) -> tuple[jax.Array, tuple]:
    return _times(rows, x, kernels, counts, contracted=1), (x, kernels, counts)


def _backward(rows: int, residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernels, counts = residuals
    return _times(rows, d_out, kernels, counts, contracted=2), _kernel_gradients(rows, x, d_out, kernels, counts), None


_product.defvjp(_forward, _backward)


def _times(rows: int, x: jax.Array, kernels: jax.Array, counts: jax.Array, *, contracted: int) -> jax.Array:
    """Multiplies x [M, D or F] by kernels [E, D, F], summing over the kernels' axis `contracted`.

    The last block of a group may extend into the next group, which then overwrites those rows.
    """
    M, width = len(x), kernels.shape[3 - contracted]
    x, kernels = _padded(x, rows), kernels.astype(x.dtype)

    def group(e: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        kernel = kernels[e]

        def block(first: jax.Array, out: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(x, first, rows)
            product = _dot(part, kernel, 1, contracted - 1).astype(out.dtype)
            return jax.lax.dynamic_update_slice_in_dim(out, product, first, 0)

        return _over_blocks(rows, start, end, block, out)

    return _over_groups(counts, group, jax.lax.full_like(x, 0, shape=(M + rows, width)))[:M]


def _kernel_gradients(rows: int, x: jax.Array, d_out: jax.Array, kernels: jax.Array, counts: jax.Array) -> jax.Array:
    """Computes `x^T d_out` of each group: [E, D, F]."""
    x, d_out = _padded(x, rows), _padded(d_out, rows)
    nothing = jax.lax.full_like(x, 0, jnp.float32, shape=kernels.shape[1:])

    def group(e: jax.Array, start: jax.Array, end: jax.Array, gradients: jax.Array) -> jax.Array:
        def block(first: jax.Array, total: jax.Array) -> jax.Array:
            mine = (first + jnp.arange(rows) < end)[:, None]
            part = jnp.where(mine, jax.lax.dynamic_slice_in_dim(x, first, rows), 0)
            return total + _dot(part, jax.lax.dynamic_slice_in_dim(d_out, first, rows), 0, 0)

        total = _over_blocks(rows, start, end, block, nothing)
        return jax.lax.dynamic_update_index_in_dim(gradients, total.astype(gradients.dtype), e, 0)

    return _over_groups(counts, group, jnp.zeros_like(kernels))


def _over_groups(counts: jax.Array, body: Callable[..., jax.Array], carry: jax.Array) -> jax.Array:
    """Runs `carry = body(e, start, end, carry)` for each non-empty group e, in order."""
    ends = jnp.cumsum(counts)
    used = jnp.argsort(counts == 0, stable=True)

    def step(i: jax.Array, carry: jax.Array) -> jax.Array:
        e = used[i]
        return body(e, ends[e] - counts[e], ends[e], carry)

    result: jax.Array = jax.lax.fori_loop(0, (counts > 0).sum(), step, carry)
    return result


def _over_blocks(rows: int, start: jax.Array, end: jax.Array, body: Block, carry: jax.Array) -> jax.Array:
    """Runs `carry = body(first, carry)` for every `rows`-th row `first` from `start` to `end`."""
    blocks = -((start - end) // rows)
    result: jax.Array = jax.lax.fori_loop(0, blocks, lambda j, carry: body(start + j * rows, carry), carry)
    return result


def _dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Multiplies two matrices over one axis of each, with a float32 result."""
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _padded(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows), (0, 0)))
