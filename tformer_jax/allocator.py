"""Tunes glibc's allocator for large arrays that are allocated and freed in every step."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's `mallopt`."""
MADV_HUGEPAGE = 14
HUGE_PAGE = 2**21
NEVER = 2**31 - 1
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""Device files of NVIDIA's and AMD's drivers and of TPUs."""


def keep_memory(share: float = 0.5) -> bool:
    """Makes glibc keep freed memory, on huge pages, instead of returning it to the system.

    XLA allocates the temporary arrays of a step in every step. By default, glibc maps such large blocks and unmaps
    them when they are freed, so that each step page-faults on all its memory: a seventh to a third of the time of a
    training step on a CPU, measured on two AMD EPYC cores. Only address space is reserved in advance.

    Must be called before JAX starts its threads. On a machine with a GPU or TPU, whose own memory holds the arrays,
    nothing is changed: the one arena that all threads share would slow down compilation by many threads.

    Args:
        share: fraction of the machine's memory to reserve on huge pages.

    Returns:
        Whether the settings took effect; always False on systems without glibc.
    """
    if not sys.platform.startswith("linux") or (not cpu_only() and any(map(os.path.exists, ACCELERATORS))):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    kept = [libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, NEVER), libc.mallopt(M_ARENA_MAX, 1)]
    size = int(share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    heap = libc.malloc(size)
    if heap is None or not all(kept):
        return False
    first = -(-heap // HUGE_PAGE) * HUGE_PAGE
    libc.madvise(first, size - HUGE_PAGE, MADV_HUGEPAGE)
    libc.free(heap)
    return True


def cpu_only() -> bool:
    """Returns whether the environment restricts JAX to the CPU."""
    return os.environ.get("JAX_PLATFORMS", "").lower() == "cpu"
