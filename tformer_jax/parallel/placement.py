"""Places batches on a mesh, runs computations there, and gathers results in every process."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import data_parallelism


def mesh_of(arrays: Any) -> Mesh | None:
    """Returns the mesh that arrays are sharded over; None for a single device."""
    for leaf in jax.tree.leaves(arrays):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            assert isinstance(sharding.mesh, Mesh)
            return sharding.mesh
    return None


@contextlib.contextmanager
def use_whole_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Context in which computations run on the whole mesh, even without arguments on it; no effect for None."""
    if mesh is None:
        yield
    else:
        with jax.set_mesh(mesh), rules.use_mesh(mesh):
            yield


def own_shards(mesh: Mesh) -> tuple[int, ...]:
    """Returns the indices, in `range(data_parallelism(mesh))`, of the batch shards that this process holds."""
    count = data_parallelism(mesh)
    held = rules.batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return tuple(sorted({(index[0].start or 0) if index else 0 for index in held}))


def shard_batch(
    mesh: Mesh | None, batch: Mapping[str, np.ndarray], own: Sequence[int] | None = None
) -> Mapping[str, Any]:
    """Shards the rows of a global batch over a mesh, or replicates them if they do not divide evenly.

    Args:
        batch: all rows in every process; with `own` (see `own_shards`), only the rows of the process's shards.
    """
    if mesh is None:
        return batch
    count, split = data_parallelism(mesh), rules.batch_sharding(mesh)

    def place(rows: np.ndarray) -> jax.Array:
        if own is not None:
            shape = count * len(rows) // len(own), *rows.shape[1:]
            return jax.make_array_from_process_local_data(split, rows, shape)
        where = rules.replicated(mesh) if len(rows) % count else split
        return jax.make_array_from_callback(rows.shape, where, rows.__getitem__)

    return {name: place(rows) for name, rows in batch.items()}


def to_host(tree: Any) -> Any:
    """Gathers sharded arrays as complete NumPy arrays in every process."""
    return multihost_utils.process_allgather(tree, tiled=True)
