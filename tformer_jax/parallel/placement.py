"""Computing where parameters live: on their mesh, with rows split over it, and results that every process can read."""

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


def own_shards(mesh: Mesh) -> tuple[int, ...]:
    """Which of the `data_parallelism(mesh)` equal runs of rows of a global batch the devices of this process hold."""
    count = data_parallelism(mesh)
    held = rules.batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return tuple(sorted(set(map(_first_row, held))))


def _first_row(index: tuple[slice, ...] | None) -> int:
    return (index[0].start or 0) if index else 0


def shard_batch(
    mesh: Mesh | None, batch: Mapping[str, np.ndarray], own: Sequence[int] | None = None
) -> Mapping[str, Any]:
    """A global batch with its rows split over a mesh, or replicated if their number does not divide.

    Args:
        batch: all rows in every process; or with `own` (see `own_shards`), only those of this process.
    """
    if mesh is None:
        return batch
    count = data_parallelism(mesh)

    def place(rows: np.ndarray) -> jax.Array:
        if own is not None:
            size = len(rows) // len(own)
            parts = {shard * size: rows[number * size :][:size] for number, shard in enumerate(own)}
            shape = count * size, *rows.shape[1:]
            return jax.make_array_from_callback(shape, split, lambda index: parts[_first_row(index)])
        where = rules.replicated(mesh) if len(rows) % count else split
        return jax.make_array_from_callback(rows.shape, where, rows.__getitem__)

    split = rules.batch_sharding(mesh)
    return {name: place(rows) for name, rows in batch.items()}


def to_host(tree: Any) -> Any:
    """Arrays of a mesh as NumPy arrays, whole in each process."""
    return multihost_utils.process_allgather(tree, tiled=True)
