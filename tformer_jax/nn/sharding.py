"""Where activations live, said by the names of their axes."""

import math

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """x, split along the mesh axes that the rules in effect (`flax.linen.logical_axis_rules`) give its axes.

    Without a mesh in effect (`jax.sharding.use_abstract_mesh`) it is x itself. An axis that cannot be split evenly
    stays whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    spec = nn.logical_to_mesh_axes(names)
    fitting = [_fitting(axis, size, mesh.shape) for axis, size in zip(spec or (), x.shape, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*fitting))


def whole(x: jax.Array) -> jax.Array:
    """x on every device of the mesh in effect, so that every process can read it."""
    return constrain(x, *[None] * x.ndim)


def _fitting(axis, size: int, sizes) -> str | tuple[str, ...] | None:
    """`axis`, or None where it does not divide `size`."""
    names = (axis,) if isinstance(axis, str) else axis or ()
    return None if size % math.prod(sizes[name] for name in names) else axis
