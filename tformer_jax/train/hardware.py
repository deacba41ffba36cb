"""What the devices of this run can do, and how much of their memory is used."""

import resource
import sys

import jax

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 FLOP/s of one device by the beginning of its name, as the vendors state them."""


def peak_flops(devices: list[jax.Device]) -> float | None:
    """FLOP/s of all these devices in bfloat16; None where one is unknown."""
    found = [next((peak for name, peak in PEAK_FLOPS.items() if d.device_kind.startswith(name)), None) for d in devices]
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
