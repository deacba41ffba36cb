"""CPU tuning that needs no JAX: glibc's allocator, options of XLA's compiler, and peak memory. See also `nn.xla`."""

import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`."""
MADV_HUGEPAGE = 14
HUGE_PAGE = 2**21
NEVER = 2**31 - 1
RESERVED = 0.5
"""Fraction of the machine's memory that is reserved on huge pages."""
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""Device files of NVIDIA's and AMD's drivers and of TPUs."""
COMPILATION = "/jax/core/compile/backend_compile_duration"
"""Event that JAX records for each compilation."""
LONG_COMPILATION = 0.5
"""Seconds of a compilation after which memory is returned."""
OPTIMIZATION_LEVEL = "xla_backend_optimization_level"
"""Option of XLA's compiler, 3 by default."""
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Linux' control groups: the file that names the groups of this process, and the folder of all groups."""


def keep_memory() -> bool:
    """Makes glibc keep freed memory, on huge pages, instead of returning it to the system.

    XLA allocates the temporary arrays of a step in every step. By default, glibc maps such large blocks and unmaps
    them when they are freed, so that each step page-faults on all its memory: a seventh to a third of the time of a
    train step on a CPU, measured on two AMD EPYC cores. Only address space is reserved in advance.

    Only the heap of the main thread can hold blocks of any size; `run_in_calling_thread` lets XLA allocate there. (One
    heap for all threads would keep their blocks too, but threads that compile wait for it: starts took a fifth longer
    on two cores, and five times as long on 16 cores beside a GPU.)

    Returns:
        Whether the settings took effect; False unless `allocates_with_glibc`.
    """
    if not allocates_with_glibc():
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    accepted = [libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, NEVER)]
    size = int(RESERVED * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    heap = libc.malloc(size)
    if heap is None or not all(accepted):
        return False
    first = -(-heap // HUGE_PAGE) * HUGE_PAGE
    libc.madvise(first, size - HUGE_PAGE, MADV_HUGEPAGE)
    libc.free(heap)
    return True


def run_in_calling_thread() -> None:
    """Makes JAX run programs on the CPU in the calling thread, not in JAX's threads, where `keep_memory` applies.

    On two AMD EPYC cores, train steps are 5 to 15 % faster than with one heap for all threads, and the process needs
    15 to 60 % less memory. Must be called before JAX runs its first program.

    Engines that decode side by side call JAX in threads of their own, and allocate in the heaps of these threads.

    Each long compilation then returns its own memory, which the heaps of its threads would keep: 80 to 200 MiB in the
    recorded benchmarks of training.
    """
    import jax  # imported here, because commands that compute nothing do not import it

    if allocates_with_glibc():
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.monitoring.register_event_duration_secs_listener(_return_memory)


def _return_memory(event: str, duration_secs: float, **_: str | int) -> None:
    """Returns the free memory of all heaps after a compilation that took long enough to need much of it."""
    if event == COMPILATION and duration_secs > LONG_COMPILATION:
        ctypes.CDLL(None).malloc_trim(0)


def allocates_with_glibc() -> bool:
    """Returns whether glibc allocates JAX's arrays: not beside a GPU or TPU, unless JAX is restricted to the CPU."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"):
        return False
    return os.environ.get("JAX_PLATFORMS", "").lower() == "cpu" or not any(map(os.path.exists, ACCELERATORS))


def train_step_options(platform: str) -> dict[str, Any] | None:
    """Returns XLA's options for a train step on `platform`; None: the defaults.

    On CPUs, XLA copies the moments of AdamW before it updates them in place, unless it analyzes regions: the steps of
    the recorded benchmarks then need 4 to 6 % less temporary memory. XLA of JAX 0.10 also merges what
    `jax.checkpoint` recomputes with the forward pass, unless the pass that removes its barriers is off; `model.remat`
    would save nothing on CPUs.
    """
    if platform != "cpu":
        return None
    return {
        "xla_cpu_copy_insertion_use_region_analysis": True,
        "xla_disable_hlo_passes": "cse_barrier_expander",
    }


def initialization_options(platform: str) -> dict[str, Any] | None:
    """Returns XLA's options for a program that runs once, such as the initialization; None: the defaults.

    On CPUs, level 1 takes half the compilation time of level 3, with the same values. `XLA_FLAGS` takes precedence.
    """
    chosen = OPTIMIZATION_LEVEL in os.environ.get("XLA_FLAGS", "")
    return {OPTIMIZATION_LEVEL: 1} if platform == "cpu" and not chosen else None


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use, by its affinity and the quotas of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *map(math.ceil, _quotas())])


def _quotas() -> Iterator[float]:
    """Yields the quotas of the control groups (version 2) around this process, in cores."""
    named = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for own in (line.removeprefix("0::/") for line in named if line.startswith("0::/")):
        for group in (GROUPS / own, *(GROUPS / own).parents):
            if group.is_relative_to(GROUPS) and (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text().split()
                if quota != "max":
                    yield int(quota) / int(period)


def peak_bytes() -> int:
    """Returns the peak memory of this process, in bytes.

    On Linux, `ru_maxrss` includes the peak of the parent process; `VmHWM` does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
