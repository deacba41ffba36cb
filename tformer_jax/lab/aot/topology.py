"""Describes the devices of a TPU slice with libtpu, on a machine without TPUs."""

import math
import os
import re
from collections.abc import Sequence

import jax

from tformer_jax.base import checks
from tformer_jax.base.errors import UserError, first_line

ACCELERATORS = {"v4": ("v4", 2), "v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}
"""By chip: the prefix of its Cloud TPU accelerator type, and the cores per chip that the type's number counts."""


def slice_devices(name: str) -> Sequence[jax.Device]:
    """Returns the devices of the slice `name`, such as v5e:4x4, for ahead-of-time compilation.

    JAX itself runs on the CPU from then on.

    Raises:
        UserError: the name is invalid, or libtpu is missing or cannot describe the slice.
    """
    kind, _, sides = name.partition(":")
    if kind not in ACCELERATORS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", sides):
        raise UserError(
            f"--topology {name}: write a kind ({', '.join(ACCELERATORS)}) and the sides of the slice, such as v5e:4x4"
        )
    checks.require("--topology", ("libtpu",), "aot")
    accelerator, cores = ACCELERATORS[kind]
    chips = math.prod(map(int, sides.split("x")))
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{accelerator}-{cores * chips}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is opened, so processes cannot conflict
    }
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--topology {name}: libtpu cannot describe it: {first_line(error)}") from error
    return devices
