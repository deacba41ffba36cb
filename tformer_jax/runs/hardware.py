"""Published rates of accelerators, and peak FLOP/s and memory use of the devices of a run."""

import dataclasses
import os
from collections.abc import Iterator

import jax

from tformer_jax.base.cpu import peak_bytes
from tformer_jax.base.numbers import GIB
from tformer_jax.config import Config

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
    hbm: float = 0
    """HBM bandwidth in bytes/s (TPUs only)."""
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
    "v4": Chip("TPU v4", 275e12, 32 * GIB, hbm=1200 * GB, ici=300 * GB),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * GIB, hbm=800 * GB, ici=200 * GB),
    "v5p": Chip("TPU v5", 459e12, 95 * GIB, hbm=2765 * GB, ici=600 * GB),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * GIB, hbm=1600 * GB, ici=400 * GB),
}
"""Chips by short name; for TPUs, the kind in a topology such as v5e:4x4."""


def peak_flops(devices: list[jax.Device]) -> float | None:
    """Returns the total peak bfloat16 FLOP/s of `devices`; None if one of them is unknown, or a part of a GPU (MIG)."""
    kinds = sorted(CHIPS.values(), key=lambda chip: len(chip.kind), reverse=True)  # TPU v5 lite before TPU v5
    names = [device.device_kind for device in devices if " MIG " not in device.device_kind]
    peaks = [next((chip.flops for chip in kinds if name.startswith(chip.kind)), None) for name in names]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(devices) else None


def memory_bytes(devices: list[jax.Device]) -> int:
    """Returns the largest peak memory of this process's `devices`, in bytes; on CPUs, the peak RSS of the process."""
    statistics = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    used = [memory["peak_bytes_in_use"] for memory in statistics if memory and "peak_bytes_in_use" in memory]
    return max(used) if used else peak_bytes()


def device_memory() -> int | None:
    """Returns the memory in bytes of one local device for JAX; CPU devices share the host's; None if unknown."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    host = host_memory()
    return None if host is None or jax.default_backend() != "cpu" else host // jax.local_device_count()


def host_memory() -> int | None:
    """Returns the memory of this host in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def dtype_warnings(cfg: Config) -> Iterator[str]:
    """Yields a warning for a computation dtype that is slow on the default backend, and for coarse parameters.

    XLA's CPU backend converts bfloat16 around most operations but products with kernels and embeddings; float32 with
    operands of bfloat16 (`nn.linear`) is faster. Parameters in bfloat16 have 8 significant bits, so that a norm's scale
    of 1 may never change. With LoRA, they are not trained.
    """
    dtype, param_dtype = cfg.model.dtype, cfg.model.param_dtype
    if dtype != "float32" and jax.default_backend() == "cpu":
        yield (
            f"on a CPU, model.dtype='float32' is more precise than {dtype!r} and trains faster; on one with "
            "AVX512-BF16 or AMX, set JAX_DEFAULT_MATMUL_PRECISION=bfloat16 with it"
        )
    if param_dtype != "float32" and not cfg.train.lora_rank:
        yield (
            f"model.param_dtype={param_dtype!r} rounds the parameters after each step: updates of less than 1/512 of a "
            f"parameter are lost; model.param_dtype='float32' with model.dtype={param_dtype!r} keeps them"
        )
