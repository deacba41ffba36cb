"""What the devices of this run can do, and how much of their memory is used."""

import resource
import sys

import jax

from tformer_jax.train.chips import CHIPS


def peak_flops(devices: list[jax.Device]) -> float | None:
    """FLOP/s of all these devices in bfloat16; None where one is unknown."""
    kinds = sorted(CHIPS.values(), key=lambda chip: len(chip.kind), reverse=True)  # TPU v5 lite before TPU v5
    found = [next((chip.flops for chip in kinds if d.device_kind.startswith(chip.kind)), None) for d in devices]
    known = [peak for peak in found if peak is not None]
    return sum(known) if len(known) == len(devices) else None


def memory_bytes(devices: list[jax.Device]) -> int:
    """The most memory that was in use so far on one of these devices of this process; on CPUs, by the process."""
    statistics = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    used = [found["peak_bytes_in_use"] for found in statistics if found and "peak_bytes_in_use" in found]
    if used:
        return max(used)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def slow_dtype(dtype: str) -> str | None:
    """What to say of a computation dtype that is slower than float32 on this device; None: nothing.

    XLA for CPUs converts bfloat16 around most operations: a step took 1.2 times as long on two AMD EPYC cores (Zen 4).
    """
    if dtype == "float32" or jax.default_backend() != "cpu":
        return None
    return f"model.dtype={dtype!r} trains more slowly on a CPU than 'float32' does, which is also more precise"
