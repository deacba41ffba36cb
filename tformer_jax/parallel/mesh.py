"""The device mesh, with named axes."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

from tformer_jax.base.errors import UserError
from tformer_jax.config import MESH_AXES, ParallelConfig

BATCH_AXES = ("data", "fsdp", "expert")
"""The mesh axes that shard the batch."""


def axis_sizes(cfg: ParallelConfig, devices: int) -> dict[str, int]:
    """Returns the size of each mesh axis for `devices` devices; some may remain unused.

    Raises:
        UserError: the sizes exceed the number of devices, or do not divide it if an axis is -1 (all that remain).
    """
    sizes = cfg.sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " * ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size not in (-1, 1))
    if fixed > devices:
        present = "there is only 1" if devices == 1 else f"there are {devices}"
        raise UserError(f"{product} needs {fixed} devices, but {present}; use sizes whose product is at most {devices}")
    if -1 not in sizes.values():
        return sizes
    if devices % fixed:
        raise UserError(
            f"{product} does not divide the {devices} devices; write "
            f"{'a size that does' if product.count('=') == 1 else 'sizes whose product does'}, such as "
            f"{max(size for size in range(1, fixed) if devices % size == 0)}"
        )
    return {name: devices // fixed if size == -1 else size for name, size in sizes.items()}


def make_mesh(cfg: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh over `devices` (default: all devices of all processes), or over the first of them if fewer suffice.

    Raises:
        UserError: the axes do not fit the devices or their interconnect, or leave a process without a device.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    sizes = axis_sizes(cfg, len(devices))
    used = devices[: math.prod(sizes.values())]
    if len(used) < len(devices) and jax.process_count() > 1:
        raise UserError(
            f"the mesh uses {len(used)} of the {len(devices)} devices of {jax.process_count()} processes, but must use "
            "all; write parallel.data=-1"
        )
    try:
        return Mesh(arrange(tuple(sizes.values()), used), MESH_AXES)
    except (AssertionError, NotImplementedError) as error:
        product = " * ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)
        raise UserError(
            f"{product} does not fit the interconnect of these {len(devices)} {devices[0].device_kind} devices; use "
            "all of them, with sizes that divide the sides of the slice"
        ) from error


def first_device_mesh() -> Mesh:
    """Returns the mesh of the first device of this process."""
    return make_mesh(ParallelConfig(data=1), jax.local_devices()[:1])


def arrange(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices as an array of shape `sizes`, with the fastest links along the last axes.

    TPU slices and GPU nodes, which a slower network connects, are spread over the first axes that they divide
    (`outer_sizes`). A mesh axis may take a part of an axis of a slice's torus. Unmeasured on devices.
    """
    granules = Counter(map(_granule_index, devices))
    if len(granules) == 1 or len(set(granules.values())) > 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    outer = outer_sizes(sizes, len(granules))
    return mesh_utils.create_hybrid_device_mesh(
        tuple(size // part for size, part in zip(sizes, outer, strict=True)),
        outer,
        devices,
        process_is_granule=getattr(devices[0], "slice_index", None) is None,
        allow_split_physical_axes=True,
    )


def outer_sizes(sizes: tuple[int, ...], granules: int) -> tuple[int, ...]:
    """Factors `granules`, which divide the product of `sizes`, into one factor per axis, each as large as possible."""
    outer = []
    for size in sizes:
        outer.append(math.gcd(size, granules))
        granules //= outer[-1]
    return tuple(outer)


def _granule_index(device: Any) -> int:
    """Returns the index of a device's slice (TPU) or node (GPU); 0 on other platforms.

    A GPU without a slice index is assigned to the node of its process.
    """
    if device.platform not in ("tpu", "gpu"):
        return 0
    index = getattr(device, "slice_index", None)
    if index is None:
        return 0 if device.platform == "tpu" else device.process_index
    return index


def data_parallelism(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of a batch.

    Training batches must be a multiple of it; other batches are replicated if they are not.
    """
    return math.prod(mesh.shape[name] for name in BATCH_AXES)
