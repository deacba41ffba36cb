"""Where arrays live, said by the names of their axes."""

import math
from collections.abc import Iterable

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """x, split along the mesh axes that the rules in effect (`flax.linen.logical_axis_rules`) give its axes.

    Without a mesh in effect (`jax.sharding.use_abstract_mesh`) it is x itself. An axis that cannot be split evenly
    stays whole.
    """
    if jax.sharding.get_abstract_mesh().size <= 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(names, x.shape))


def whole(x: jax.Array) -> jax.Array:
    """x on every device of the mesh in effect, so that every process can read it."""
    return constrain(x, *[None] * x.ndim)


def partition(names: Iterable[str | None], shape: Iterable[int]) -> PartitionSpec:
    """How the rules in effect split an array, by the logical names of its axes."""
    return PartitionSpec(*(mesh_axes(name, size) if name else None for name, size in zip(names, shape, strict=True)))


def mesh_axes(name: str, size: int = 0) -> tuple[str, ...]:
    """The mesh axes along which the rules in effect split a logical axis; () where they do not divide its size.

    Axes of one device are left out, and so are all of them without a mesh in effect.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    where = (nn.logical_to_mesh_axes((name,)) or (None,))[0] or () if sizes else ()
    found = tuple(axis for axis in ((where,) if isinstance(where, str) else where) if sizes[axis] > 1)
    return () if size % devices(found) else found


def devices(mesh_axes: Iterable[str]) -> int:
    """How many devices lie along these axes of the mesh in effect."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in mesh_axes)


def platform() -> str:
    """Where the mesh in effect is ("cpu", "gpu" or "tpu"), or the devices of this process without one.

    They differ where a program is compiled for devices that this machine does not have.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
