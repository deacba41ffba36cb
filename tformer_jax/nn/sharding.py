"""Sharding of arrays by the logical names of their axes."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of x to the current rules (`flax.linen.logical_axis_rules`) for the axes `names`.

    Returns x unchanged without a current mesh (`jax.sharding.use_abstract_mesh`). An axis that cannot be split evenly
    is replicated.
    """
    if jax.sharding.get_abstract_mesh().size <= 1:
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(names, x.shape))


def replicate(x: jax.Array) -> jax.Array:
    """Replicates x on every device of the current mesh, so that every process can read it."""
    return constrain(x, *[None] * x.ndim)


def named(init: Callable[..., Any], *names: str | None) -> Callable[..., Any]:
    """Adds logical axis names to an initializer, by which `parallel.rules` shards the parameter."""
    return nn.with_logical_partitioning(init, names)


def activation_spec(names: Iterable[str | None], shape: Iterable[int]) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array under the current rules, by the logical names and sizes of its axes."""
    return PartitionSpec(*(mesh_axes(name, size) if name else None for name, size in zip(names, shape, strict=True)))


def mesh_axes(name: str, size: int = 0) -> tuple[str, ...]:
    """Returns the mesh axes along which the current rules shard a logical axis; () if they do not divide its size.

    Mesh axes of size 1 are omitted. Without a current mesh the result is ().
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    where = (nn.logical_to_mesh_axes((name,)) or (None,))[0] or () if sizes else ()
    sharded = tuple(axis for axis in ((where,) if isinstance(where, str) else where) if sizes[axis] > 1)
    return () if size % devices(sharded) else sharded


def devices(names: Iterable[str]) -> int:
    """Returns the number of devices along these axes of the current mesh."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in names)


def platform() -> str:
    """Returns the platform of the current mesh ("cpu", "gpu" or "tpu"), or JAX's default backend without a mesh.

    They differ if a program is compiled for devices that this machine does not have.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
