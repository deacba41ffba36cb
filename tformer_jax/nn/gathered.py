"""All-gathers of FSDP-sharded parameters at each use, and reduce-scatters of their gradients.

If a mesh axis spans both sides of a TPU slice's torus, XLA's partitioner sums these gradients by an all-reduce, which
sends twice the bytes of a reduce-scatter. It also replaces a reduce-scatter or all-gather among all devices of the axis
by an all-reduce. Both are therefore explicit here, in two stages of smaller groups, along a leading axis of
shards. An all-reduce remains in the second stage for shards of fewer than 8 rows (one tile), where it sends a fraction
of the parameter. On 16 chips, XLA also sums by one all-reduce the gradients of a table that embeds sources and targets
and is the output head. Observed in programs compiled for slices of v5e and v6e (`tests/programs/topologies.py`);
unmeasured on devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tformer_jax import axes
from tformer_jax.nn import sharding

PLATFORMS = ("tpu",)
"""Platforms with explicit gathers; XLA for GPUs generates reduce-scatters itself."""

Groups = list[list[int]]
MeshAxes = tuple[str, ...]
Names = tuple[str | None, str | None]


def with_gathered(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    parameter: jax.Array,
    names: Names,
    *,
    dtype: Any = None,
) -> jax.Array:
    """Computes `function(x, parameter)` with a matrix gathered along the model width.

    Args:
        function: must treat the rows of x independently.
        names: logical names of the parameter's two axes; one must be the model width.
        dtype: as for `all_gather`.
    """
    mesh, axis = jax.sharding.get_abstract_mesh(), names.index(axes.EMBED)
    rows = sharding.mesh_axes(axes.BATCH, len(x)) if mesh.size > 1 else ()
    along = sharding.mesh_axes(axes.EMBED, parameter.shape[axis]) if rows else ()
    if not along or mesh.manual_axes or sharding.platform() not in PLATFORMS or not set(along) <= set(rows):
        return function(x, parameter)
    name = names[1 - axis]
    other = sharding.mesh_axes(name, parameter.shape[1 - axis]) if name else ()

    @jax.checkpoint
    def on_each_device(x: jax.Array, shard: jax.Array) -> jax.Array:
        return function(x, all_gather(shard, along, axis, other, dtype=dtype))

    out: jax.Array = jax.shard_map(
        on_each_device,
        in_specs=(PartitionSpec(rows), PartitionSpec(*[None] * axis, along)),
        out_specs=PartitionSpec(rows),
        axis_names=set(rows),
        check_vma=False,
    )(x, parameter)
    return out


def all_gather(shard: jax.Array, along: MeshAxes, axis: int, last: MeshAxes = (), *, dtype: Any = None) -> jax.Array:
    """All-gathers the shards of a parameter along mesh axes, inside `jax.shard_map`; reduce-scatters its gradient.

    Args:
        last: mesh axes that shard the other axis of a matrix, if `jax.shard_map` is not manual over them.
        dtype: dtype that the shards are rounded to when they are sent; the result and the gradient have the dtype of
            `shard`. None: that dtype.
    """
    dtype = shard.dtype if dtype is None else dtype
    if sharding.platform() not in PLATFORMS and dtype == shard.dtype:
        return jax.lax.all_gather(shard, along, axis=axis, tiled=True)
    gathered: jax.Array = _in_stages(jnp.moveaxis(shard, axis, 0), along, last, dtype)
    return jnp.moveaxis(gathered, 0, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _in_stages(shard: jax.Array, along: MeshAxes, last: MeshAxes, dtype: Any) -> jax.Array:
    """All-gathers along the first axis."""

    def gather(shard: jax.Array) -> jax.Array:
        shards = shard.astype(dtype)[None]
        for groups in reversed(_stages_along(along)):
            shards = jax.lax.all_gather(shards, along, axis_index_groups=groups, tiled=True)
        return shards.reshape(-1, *shard.shape[1:]).astype(shard.dtype)

    return _manual(gather, last)(shard)


def _forward(shard: jax.Array, along: MeshAxes, last: MeshAxes, dtype: Any) -> tuple[jax.Array, None]:
    return _in_stages(shard, along, last, dtype), None


def _backward(along: MeshAxes, last: MeshAxes, dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    def scatter(gradient: jax.Array) -> jax.Array:
        rows = gradient
        for groups in _stages_along(along):
            parts = len(groups[0]) if groups else sharding.devices(along)
            rows = rows.reshape(parts, -1, *gradient.shape[1:])  # many rows a part, for XLA to scatter whole tiles
            rows = jax.lax.psum_scatter(rows, along, axis_index_groups=groups, tiled=True)[0]
        return rows

    return (_manual(scatter, last)(gradient),)


_in_stages.defvjp(_forward, _backward)


def _stages_along(along: MeshAxes) -> list[Groups | None]:
    """Returns the `stages` of these mesh axes; a single stage where XLA needs no stages."""
    return stages(sharding.devices(along)) if sharding.platform() in PLATFORMS else [None]


def _manual(function: Callable[[jax.Array], jax.Array], mesh_axes: MeshAxes) -> Callable[[jax.Array], jax.Array]:
    """Also maps a function of a matrix over these mesh axes, along which the partitioner would gather the matrix."""
    if not mesh_axes:
        return function
    where = PartitionSpec(None, mesh_axes)
    return jax.shard_map(function, in_specs=where, out_specs=where, axis_names=set(mesh_axes), check_vma=False)


def stages(devices: int) -> list[Groups | None]:
    """Returns the device groups of successive reduce-scatters, after which device i holds shard i.

    The devices form the squarest possible grid, row by row. The groups of the first stage are the columns of the grid,
    the groups of the second stage its rows; each group is a list of device indices. A prime number of devices has one
    stage with all devices in one group, None.
    """
    rows = max(side for side in range(1, math.isqrt(devices) + 1) if devices % side == 0)
    columns = devices // rows
    if rows == 1:
        return [None]
    return [
        [list(range(column, devices, columns)) for column in range(columns)],
        [list(range(row * columns, (row + 1) * columns)) for row in range(rows)],
    ]
