"""Freed memory stays with the process and is not mapped again."""

import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tformer_jax.base import cpu

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is the C library of Linux")

FAULTS = """
import resource
from tformer_jax.base.cpu import keep_memory, run_in_calling_thread

assert keep_memory()
run_in_calling_thread()
import jax

@jax.jit
def total(x):
    return jax.lax.optimization_barrier(x[::-1] * 2).sum()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        total(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

x = jax.numpy.ones(2**24)
print(min(faults() for _ in range(4)))
"""
"""Prints the page faults of ten runs of a program with a temporary array of 64 MiB, after the heap has grown."""


@pytest.mark.slow
def test_temporary_arrays_touch_no_new_memory_pages():
    actual = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, check=True)
    assert int(actual.stdout) < 10 * 2**26 // 2**21  # a new huge page for every 2 MiB of the ten arrays


@pytest.mark.parametrize(("platforms", "applies"), [("cpu", True), ("cuda,cpu", False), ("", False)])
def test_it_applies_beside_an_accelerator_only_if_jax_is_restricted_to_the_cpu(
    platforms, applies, monkeypatch, tmp_path
):
    monkeypatch.setattr(cpu, "ACCELERATORS", (str(tmp_path),))
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert cpu.allocates_with_glibc() is applies


def test_the_peak_memory_where_there_is_no_proc(monkeypatch):
    used = types.SimpleNamespace(ru_maxrss=3)
    monkeypatch.setattr(resource, "getrusage", lambda who: {resource.RUSAGE_SELF: used}[who])
    monkeypatch.setattr(Path, "exists", lambda path: False)
    for system, peak in (("linux", 3 * 1024), ("darwin", 3)):  # kilobytes, bytes
        monkeypatch.setattr(sys, "platform", system)
        assert cpu.peak_bytes() == peak
