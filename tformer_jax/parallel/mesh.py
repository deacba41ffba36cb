"""The mesh: the devices of this run, arranged along named axes."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tformer_jax.config import ConfigError, ParallelConfig

DATA_AXIS = "data"


def make_mesh(cfg: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (default: all) with one axis, `data`, along which batches are split.

    Raises:
        ConfigError: more devices are asked for than there are.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    size = len(devices) if cfg.data == -1 else cfg.data
    if size > len(devices):
        raise ConfigError(
            f"parallel.data={cfg.data}: only {len(devices)} devices are here ({devices[0].platform}); "
            f"write -1 for all of them, or at most {len(devices)}"
        )
    return Mesh(np.asarray(devices[:size]), (DATA_AXIS,))


def data_parallelism(mesh: Mesh) -> int:
    """How many parts a batch is split into; every batch size must be a multiple of it."""
    return mesh.shape[DATA_AXIS]
