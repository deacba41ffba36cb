"""The mesh: the devices of this run, arranged along named axes."""

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

from tformer_jax.config import MESH_AXES, ConfigError, ParallelConfig

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes along which batches are split."""


def axis_sizes(cfg: ParallelConfig, devices: int) -> dict[str, int]:
    """The size of each mesh axis on so many devices, some of which may be left over.

    Raises:
        ConfigError: more devices are asked for, or one axis is to have the rest, and there is no whole one.
    """
    sizes = cfg.sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " * ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size not in (-1, 1))
    if fixed > devices:
        raise ConfigError(f"{product} asks for {fixed} devices, and there are {devices}; write -1 for all of them")
    if -1 not in sizes.values():
        return sizes
    if devices % fixed:
        raise ConfigError(
            f"{product} does not divide the {devices} devices; write "
            f"{'a size that does' if product.count('=') == 1 else 'sizes whose product does'}, such as "
            f"{max(size for size in range(1, fixed) if devices % size == 0)}"
        )
    return {name: devices // fixed if size == -1 else size for name, size in sizes.items()}


def make_mesh(cfg: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (default: all of all processes), or over the first of them if fewer are asked for.

    Raises:
        ConfigError: its axes do not fit the devices, or would leave a process without any.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    sizes = axis_sizes(cfg, len(devices))
    used = devices[: math.prod(sizes.values())]
    if len(used) < len(devices) and jax.process_count() > 1:
        raise ConfigError(
            f"the mesh has {len(used)} devices, and the {jax.process_count()} processes have {len(devices)}, which "
            "must all take part; write parallel.data=-1"
        )
    return Mesh(mesh_utils.create_device_mesh(tuple(sizes.values()), used), MESH_AXES)


def data_parallelism(mesh: Mesh | AbstractMesh) -> int:
    """How many parts a batch is split into; every batch size must be a multiple of it."""
    return math.prod(mesh.shape[name] for name in BATCH_AXES)
