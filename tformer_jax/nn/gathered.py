"""FSDP-sharded parameters: all-gathered where they are used, with reduce-scattered gradients.

On TPUs, XLA's partitioner sums these gradients by an all-reduce, which moves twice the bytes of a reduce-scatter. It
does the same for a reduce-scatter along an axis that spans both sides of a slice's torus. This module therefore
reduce-scatters explicitly, in two stages along such an axis. Observed in programs compiled for v5e:4x4 and v5e:16x16;
unmeasured on devices.
"""

import functools
import math
from collections.abc import Callable, Iterator

import jax
from jax.sharding import PartitionSpec

from tformer_jax import axes
from tformer_jax.nn import sharding

PLATFORMS = ("tpu",)
"""Platforms with explicit gathers; XLA for GPUs generates reduce-scatters itself."""

Groups = list[list[int]]


def with_whole(
    function: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, parameter: jax.Array, axis: int
) -> jax.Array:
    """Computes `function(x, parameter)` with a gathered parameter; `function` must treat rows of x independently.

    Args:
        axis: the axis of `parameter` with the model width, along which it may be sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows = sharding.mesh_axes(axes.BATCH, len(x)) if mesh.size > 1 else ()
    parts = sharding.mesh_axes(axes.EMBED, parameter.shape[axis]) if rows else ()
    if not parts or mesh.manual_axes or sharding.platform() not in PLATFORMS or not set(parts) <= set(rows):
        return function(x, parameter)

    @jax.checkpoint
    def on_each_device(x: jax.Array, part: jax.Array) -> jax.Array:
        return function(x, _whole(part, parts, axis))

    where = PartitionSpec(*[None] * axis, parts)
    out: jax.Array = jax.shard_map(
        on_each_device,
        in_specs=(PartitionSpec(rows), where),
        out_specs=PartitionSpec(rows),
        axis_names=set(rows),
        check_vma=False,
    )(x, parameter)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(part: jax.Array, along: tuple[str, ...], axis: int) -> jax.Array:
    return jax.lax.all_gather(part, along, axis=axis, tiled=True)


def _forward(part: jax.Array, along: tuple[str, ...], axis: int) -> tuple[jax.Array, None]:
    return _whole(part, along, axis), None


def _backward(along: tuple[str, ...], axis: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    for groups in stages(sharding.devices(along)):
        gradient = jax.lax.psum_scatter(gradient, along, scatter_dimension=axis, axis_index_groups=groups, tiled=True)
    return (gradient,)


_whole.defvjp(_forward, _backward)


def stages(devices: int) -> Iterator[Groups | None]:
    """Yields the device groups of successive reduce-scatters, after which device i holds part i.

    A square number of devices is taken for a square slice that a mesh numbers row by row: columns first, then rows.
    Other numbers have one stage among all devices, None.
    """
    side = math.isqrt(devices)
    if side < 2 or side * side != devices:
        yield None
        return
    yield [list(range(column, devices, side)) for column in range(side)]
    yield [list(range(row * side, (row + 1) * side)) for row in range(side)]
