"""Freed memory stays with the process and is not mapped again."""

import subprocess
import sys

import pytest

from tformer_jax import allocator

FAULTS = """
import resource, sys
import numpy as np
from tformer_jax.allocator import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(2**23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
assert keep_memory()
faults()
print(plain, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is the C library of Linux")
def test_reallocated_arrays_touch_no_new_memory_pages():
    found = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    plain, kept = map(int, found.stdout.split())
    assert plain > 10 * 2**26 // 2**21  # even on huge pages, each of ten arrays of 64 MiB was mapped anew
    assert kept < plain / 100


def test_nothing_changes_beside_an_accelerator_unless_jax_is_restricted_to_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(allocator, "ACCELERATORS", (str(tmp_path),))
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    reached = []
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: reached.append(name) or object())  # without mallopt
    for platforms, changed in (("cpu", True), ("cuda,cpu", False), ("", False)):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        reached.clear()
        assert allocator.keep_memory() is False
        assert bool(reached) is changed
