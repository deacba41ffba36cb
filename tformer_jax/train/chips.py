"""Chips by name, in the numbers that their vendors publish.

NVIDIA: data sheets of the chips and of DGX A100, H100, H200 and B200 (eight of them, one network adapter each).
Google: the "System architecture" pages of cloud.google.com/tpu/docs, one a version.
"""

import dataclasses

from tformer_jax.config.fields import ConfigError, nearest

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts them. Bandwidths are bytes/s that it sends while it receives as much."""

    kind: str
    """The beginning of JAX's `device_kind`."""
    flops: float
    """Dense bfloat16 FLOP/s."""
    memory: int = 0
    """Bytes of HBM; 0: not tabulated, nor what follows."""
    link: float = 0
    """To the others of its node along one axis of the mesh: NVLink, or the two ICI links of one torus dimension."""
    node: int = 1
    """Chips that such links join: an NVSwitch's, or a TPU pod's."""
    network: float = 0
    """To other nodes: InfiniBand, or the data-centre network."""


CHIPS = {
    "a100": Chip("NVIDIA A100", 312e12, 80 * GB, link=300 * GB, node=8, network=25 * GB),
    "h100": Chip("NVIDIA H100", 989e12, 80 * GB, link=450 * GB, node=8, network=50 * GB),
    "h200": Chip("NVIDIA H200", 989e12, 141 * GB, link=450 * GB, node=8, network=50 * GB),
    "b200": Chip("NVIDIA B200", 2250e12, 180 * GB, link=900 * GB, node=8, network=50 * GB),
    "v4": Chip("TPU v4", 275e12),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * GB, link=100 * GB, node=256, network=3.125 * GB),
    "v5p": Chip("TPU v5", 459e12, 95 * GIB, link=200 * GB, node=8960, network=6.25 * GB),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * GB, link=200 * GB, node=256, network=12.5 * GB),
}
"""By the name that users write. `link` is half (v5e, v6e) or a third (v5p) of what a chip sends over all its ICI links.

`network` is a pod's bandwidth by 256 chips (v5e: 6.4 Tbit/s, v6e: 25.6 Tbit/s), or a chip's own 50 Gbit/s (v5p).
"""


def named(name: str) -> Chip:
    """The chip that a user names.

    Raises:
        ConfigError: it is not in the table, or without the numbers that a plan needs.
    """
    known = [key for key, chip in CHIPS.items() if chip.memory]
    if name not in known:
        raise ConfigError(f"--chip {name}: is not in the table{nearest(name, known)}")
    return CHIPS[name]
