"""Processes of their own, with CPU devices, that train one model together."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests import processes
from tests.commands import ROOT
from tests.processes import Bench, environment, free_port

SAME = 1e-5
PROGRAM = """
import json, sys, zlib
from pathlib import Path
import jax, numpy as np
from tests.processes_config import get_config
from tformer_jax.config import from_config_dict
from tformer_jax.parallel import multihost, placement
from tformer_jax.train import experiment
folder, run, coordinator, count, number = sys.argv[1:]
cfg = from_config_dict(get_config())
group = multihost.start(cfg.parallel, Path(run), coordinator, int(count), int(number))
texts = group.all_gather("\u00e9" * (group.index + 1)), group.broadcast(lambda: f"from {group.index}")
built = experiment.build(cfg, Path(run), data_root=Path(folder), group=group)
sums, local = [], True
for _ in range(6):
    batch = next(built.batches)
    sums.append(zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch))))
    for name, array in placement.shard_batch(built.mesh, batch).items():
        local &= array.shape == batch[name].shape and len(array.addressable_shards) == 4 // int(count)
        local &= all(np.array_equal(part.data, batch[name][part.index]) for part in array.addressable_shards)
built.close()
print(json.dumps([group.index, group.count, texts, jax.device_count(), local, sums]))
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("processes"))


def batches(bench: Bench, count: int) -> list[list]:
    """What each of so many processes says of its first batches."""
    coordinator, run = f"localhost:{free_port()}", bench.folder / f"batches_{count}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(bench.folder), str(run), coordinator, str(count), str(number)],
            cwd=ROOT,
            env=environment(bench.cache, 4 // count),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    return [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in started]


def test_two_processes_meet_and_make_the_batches_of_one(bench):
    """The global batches are those of the pipeline alone; each device has the rows that the mesh gives it."""
    from tests.processes_config import get_config
    from tformer_jax.config import from_config_dict
    from tformer_jax.train import experiment

    cfg = from_config_dict(get_config())
    built = experiment.build(cfg, bench.folder / "alone", data_root=bench.folder)
    made = [next(built.batches) for _ in range(6)]
    built.close()
    sums = [zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch))) for batch in made]
    texts = [["\u00e9", "\u00e9\u00e9"], "from 0"]
    assert batches(bench, 2) == [[number, 2, texts, 4, True, sums] for number in range(2)]


@pytest.mark.slow
def test_four_processes_make_the_batches_of_one(bench):
    texts = [["\u00e9" * length for length in (1, 2, 3, 4)], "from 0"]
    assert batches(bench, 4)[3] == [3, 4, texts, 4, True, batches(bench, 1)[0][-1]]


@pytest.fixture(scope="module")
def whole(bench) -> Path:
    """The run of one process with four devices."""
    run = bench.folder / "whole"
    assert [each["status"] for each in bench.trained(1, run)] == [0]
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_losses_and_parameters_of_one_process(bench, whole, count):
    """Evaluated on the way, saved, and delivered as by one process on the same mesh."""
    run = bench.folder / f"of_{count}"
    assert [each["status"] for each in bench.trained(count, run)] == [0] * count
    assert processes.difference(run, whole) <= SAME
    assert (run / "result.json").exists()
    assert not list(run.glob(".shared*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_saved_by_two_and_resumed_by_one_and_by_four(bench, whole):
    for found in processes.resumed_by_others(bench):
        assert not any(found["status"]), found["says"]
        assert found["difference"] <= SAME


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "victim"), [(2, 1), (2, 0)])
def test_all_end_when_one_is_killed_and_the_run_goes_on(bench, count, victim):
    *ended, after = processes.lost(bench, count, victim)
    others = [each for number, each in enumerate(ended) if number != victim]
    assert all(other["status"] not in (0, 2, 130) for other in others)
    assert after["resumed"] == [0] * count
    assert after["seconds"] < 90


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_is_asked_to_stop_and_all_stop_at_the_same_step(bench):
    first, second, after = processes.stopped(bench)
    assert (first["status"], second["status"]) == (130, 130)
    assert first["says"] == f"Stopped at step {after['saved']}; the same command with --resume goes on from there."


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mistakes_are_one_sentence_in_every_process(bench):
    for story, sentence in (
        (processes.other_settings, "optim.learning_rate=0.5, but process 0 has 0.01; start all processes the same way"),
        (processes.missing, "of 4 processes, 1, 3 did not start within"),
        (processes.nobody_there, "of 2 processes, 0 did not start within"),
        (processes.port_in_use, "process 0 cannot listen at port"),
    ):
        for each in story(bench):
            assert each["status"] == 2
            assert sentence in each["says"]
            assert each["lines"] == 1
