"""Peak FLOP/s and memory use of the devices of a run."""

import jax

from tformer_jax.allocator import peak_bytes
from tformer_jax.train.chips import CHIPS


def peak_flops(devices: list[jax.Device]) -> float | None:
    """Returns the total peak bfloat16 FLOP/s of `devices`; None if one of them is unknown."""
    kinds = sorted(CHIPS.values(), key=lambda chip: len(chip.kind), reverse=True)  # TPU v5 lite before TPU v5
    found = [next((chip.flops for chip in kinds if d.device_kind.startswith(chip.kind)), None) for d in devices]
    known = [peak for peak in found if peak is not None]
    return sum(known) if len(known) == len(devices) else None


def memory_bytes(devices: list[jax.Device]) -> int:
    """Returns the largest peak memory of this process's `devices`, in bytes; on CPUs, the peak RSS of the process."""
    statistics = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    used = [found["peak_bytes_in_use"] for found in statistics if found and "peak_bytes_in_use" in found]
    return max(used) if used else peak_bytes()


def slow_dtype(dtype: str) -> str | None:
    """Returns a warning if `dtype` is slower than float32 on the default backend, else None.

    XLA's CPU backend converts bfloat16 around most operations: a step took 1.2 times as long on two AMD EPYC cores
    (Zen 4).
    """
    if dtype == "float32" or jax.default_backend() != "cpu":
        return None
    return f"model.dtype={dtype!r} trains more slowly on a CPU than 'float32' does, which is also more precise"
