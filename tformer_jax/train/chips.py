"""Chips, in the numbers that their vendors publish.

NVIDIA: the data sheets. Google: the "System architecture" pages of cloud.google.com/tpu/docs, one a version.
"""

import dataclasses

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts them."""

    kind: str
    """The beginning of JAX's `device_kind`."""
    flops: float
    """Dense bfloat16 FLOP/s."""
    memory: int = 0
    """TPU: bytes of HBM."""
    ici: float = 0
    """TPU: bytes/s that all its links to neighbours send together, while they receive as much."""


CHIPS = {
    "a100": Chip("NVIDIA A100", 312e12),
    "h100": Chip("NVIDIA H100", 989e12),
    "h200": Chip("NVIDIA H200", 989e12),
    "b200": Chip("NVIDIA B200", 2250e12),
    "v4": Chip("TPU v4", 275e12, 32 * GIB, ici=300 * GB),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * GIB, ici=200 * GB),
    "v5p": Chip("TPU v5", 459e12, 95 * GIB, ici=600 * GB),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * GIB, ici=400 * GB),
}
"""By short name; a TPU's is the kind of its slices."""
