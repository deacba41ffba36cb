"""Loader processes: exact restoration, signals, and their end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grain
import pytest

from tests.data.test_pipeline import assert_restored_exactly, assert_same, setup, take, train_batches
from tformer_jax.data.columns import jsonable
from tformer_jax.data.loading import LoadedBlocks

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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_another_number_of_workers_continues_with_the_next_batch(before, after):
    whole = take(train_batches(*setup("translation in buckets")), 12)
    first = train_batches(*setup("translation in buckets", workers=before))
    take(first, 5)
    state = json.loads(json.dumps(jsonable(first.get_state())))
    first.close()
    second = train_batches(*setup("translation in buckets", workers=after))
    second.set_state(state)
    assert_same(take(second, 7), whole[5:])
    second.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_states_of_workers_of_earlier_versions_are_read(workers):
    """Recorded with Grain's own state after five blocks."""
    counts = [5] if workers == 1 else [3, 2]
    state = {"next_index_in_cycle": 5 % workers, "iterators_in_use_states": [{"next_index": n} for n in counts]}
    blocks = iter(LoadedBlocks(grain.MapDataset.range(9), workers=0))
    blocks.set_state(state)
    assert list(blocks) == [5, 6, 7, 8]
    assert blocks.get_state() == {"next_index": 9}
