"""Freed memory stays with the process and is not mapped again; cores are those that the process may use."""

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


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({}, 8),
        ({"a/b": "max 100000"}, 8),
        ({"a/b": "250000 100000"}, 3),
        ({"a/b": "50000 100000"}, 1),
        ({"a": "200000 100000", "a/b": "700000 100000"}, 2),
        ({"": "400000 100000"}, 4),
        ({"other": "100000 100000"}, 8),
    ],
)
def test_a_container_has_the_cores_of_its_quota(quotas, cores, tmp_path, monkeypatch):
    """Regression test: a container with two of 64 cores recorded 64, and decoded with as many engines."""
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cpu, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cpu, "OWN_GROUPS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("1:cpu:/other\n0::/a/b\n")
    for name, quota in quotas.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{quota}\n")
    assert cpu.usable_cores() == cores
    (tmp_path / "cgroup").unlink()
    assert cpu.usable_cores() == 8
