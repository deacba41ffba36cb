"""Computing where parameters live: on their mesh, with rows split over it, and results that every process can read."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import data_parallelism


def mesh_of(arrays: Any) -> Mesh | None:
    """The mesh that arrays live on; None where that is one device."""
    for leaf in jax.tree.leaves(arrays):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            assert isinstance(sharding.mesh, Mesh)
            return sharding.mesh
    return None


@contextlib.contextmanager
def everywhere(mesh: Mesh | None) -> Iterator[None]:
    """What is computed here is computed on the whole mesh, also what has no arguments there; as usual for None."""
    if mesh is None:
        yield
    else:
        with jax.set_mesh(mesh), rules.on(mesh):
            yield


def shard_batch(mesh: Mesh | None, batch: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """A batch that every process has, with its rows on the mesh: split over it, or everywhere if that is not even."""
    if mesh is None:
        return batch

    def place(rows: np.ndarray) -> jax.Array:
        even = len(rows) % data_parallelism(mesh) == 0
        where = rules.batch_sharding(mesh) if even else rules.replicated(mesh)
        return jax.make_array_from_callback(rows.shape, where, rows.__getitem__)

    return {name: place(rows) for name, rows in batch.items()}


def to_host(tree: Any) -> Any:
    """Arrays of a mesh as NumPy arrays, whole in each process."""
    return multihost_utils.process_allgather(tree, tiled=True)
