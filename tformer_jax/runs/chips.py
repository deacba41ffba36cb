"""Published compute rates, memory sizes and link speeds of accelerators.

Sources: NVIDIA's data sheets; the "System architecture" page of each TPU version at cloud.google.com/tpu/docs.
"""

import dataclasses

from tformer_jax.base.numbers import GIB

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
    """The specification of one JAX device."""

    kind: str
    """Prefix of JAX's `device_kind`."""
    flops: float
    """Peak dense bfloat16 FLOP/s."""
    memory: int = 0
    """HBM in bytes (TPUs only)."""
    ici: float = 0
    """ICI bandwidth over all links in one direction, in bytes/s (TPUs only)."""


CHIPS = {
    "a100": Chip("NVIDIA A100", 312e12),
    "h100": Chip("NVIDIA H100", 989e12),
    "h100_nvl": Chip("NVIDIA H100 NVL", 835e12),
    "h100_pcie": Chip("NVIDIA H100 PCIe", 756e12),
    "h200": Chip("NVIDIA H200", 989e12),
    "h200_nvl": Chip("NVIDIA H200 NVL", 835e12),
    "gh200": Chip("NVIDIA GH200", 989e12),
    "b200": Chip("NVIDIA B200", 2250e12),
    "v4": Chip("TPU v4", 275e12, 32 * GIB, ici=300 * GB),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * GIB, ici=200 * GB),
    "v5p": Chip("TPU v5", 459e12, 95 * GIB, ici=600 * GB),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * GIB, ici=400 * GB),
}
"""Chips by short name; for TPUs, the kind in a topology such as v5e:4x4."""
