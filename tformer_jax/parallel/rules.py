"""The one place where logical axes meet mesh axes."""

from typing import Any

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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Batches are split along their first axis, B."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())
