"""Loader processes: exact restoration, signals, and their end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.test_pipeline import assert_restored_exactly, setup

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["translation packed", "masked tokens", "spans", "denoising"])
def test_restored_with_loader_processes(kind):
    assert_restored_exactly(setup(kind, workers=2), batches=8, points=1)


LOADED = """
import multiprocessing, os, signal, sys, time
from tests.data.test_pipeline import setup, train_batches
batches = train_batches(*setup("translation in buckets", workers=1))
next(batches)
(loader,) = multiprocessing.active_children()
for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(loader.pid, number)
for _ in range(200): next(batches)
print(loader.pid, loader.is_alive(), flush=True)
time.sleep(60)
"""


def test_loader_processes_ignore_signals_and_end_with_the_run():
    """Also if the run is killed."""
    pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    with subprocess.Popen([sys.executable, "-c", LOADED], **pipes) as run:
        loader, alive = run.stdout.readline().split()
        run.kill()
    assert alive == "True"
    for _ in range(100):
        if not Path(f"/proc/{loader}").exists():
            return
        time.sleep(0.1)
    os.kill(int(loader), signal.SIGKILL)
    pytest.fail("the loader process is still running")
