"""The one place where logical axes meet mesh axes."""

from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tformer_jax import axes
from tformer_jax.parallel.mesh import DATA_AXIS

RULES = (
    (axes.BATCH, DATA_AXIS),
    (axes.LENGTH, None),
    (axes.EMBED, None),
    (axes.HEADS, None),
    (axes.KV_HEADS, None),
    (axes.HEAD_DIM, None),
    (axes.MLP, None),
    (axes.EXPERTS, None),
    (axes.LAYERS, None),
    (axes.VOCAB, None),
    (axes.CLASSES, None),
)


def shardings(mesh: Mesh, boxed: Any) -> Any:
    """A `NamedSharding` for each leaf of a tree of logically partitioned (or plain, then replicated) arrays."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)


def state_shardings(mesh: Mesh, boxed_params: Any, state: Any) -> Any:
    """A `NamedSharding` for each leaf of a training state.

    Whatever ends with a parameter's path and has its shape (a moment, a running mean) lives where the parameter does;
    the rest is everywhere.

    Args:
        boxed_params: the parameters as shapes, boxed with their logical axes.
        state: the state as shapes.
    """
    placed = jax.tree_util.tree_leaves_with_path(shardings(mesh, boxed_params))
    shapes = jax.tree.leaves(nn.unbox(boxed_params))
    of_params = {path: (shape.shape, where) for (path, where), shape in zip(placed, shapes, strict=True)}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            shape, where = of_params.get(path[start:], (None, None))
            if where is not None and shape == leaf.shape:
                return where
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Batches are split along their first axis, B."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())
