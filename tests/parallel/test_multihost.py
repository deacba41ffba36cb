"""How a process finds its index, and the messages about processes that do not start."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.config import ParallelConfig
from tformer_jax.parallel import multihost
from tformer_jax.parallel.multihost import ProcessGroup

SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[003-004],fast1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
OTHERS = ("JOB_COMPLETION_INDEX", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "JAX_COORDINATOR_ADDRESS")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Starts a group in an environment; returns the arguments of `jax.distributed.initialize`, if it was called."""
    for name in (*SLURM, *OPEN_MPI, *POD, *OTHERS):
        monkeypatch.delenv(name, raising=False)

    def start(environment=(), coordinator=None, processes=None, process=None):
        asked = []
        monkeypatch.setattr(jax.distributed, "initialize", lambda **options: asked.append(options))
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        cfg = ParallelConfig(start_seconds=50, lost_seconds=7)
        multihost.start(cfg, tmp_path / "run", coordinator, processes, process)
        return asked

    return start


@pytest.mark.parametrize(
    "environment",
    [{**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, POD],
    ids=["one task of Slurm", "one rank of Open MPI", "a pod of no indexed job"],
)
def test_a_single_process_is_not_connected(started, environment):
    assert started(environment) == []


def test_one_process_by_flag(started):
    assert started(SLURM, processes=1) == started(SLURM, processes=1, process=0) == []


@pytest.mark.long
def test_no_cluster():
    """Without a cluster, JAX itself reports that there is none."""
    program = """
from pathlib import Path
from tformer_jax.config import ParallelConfig
from tformer_jax.parallel import multihost
print(multihost.start(ParallelConfig(), Path("runs/x"), None, None, None))
"""
    environment = {name: value for name, value in os.environ.items() if name not in {*SLURM, *OPEN_MPI, *POD, *OTHERS}}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "ProcessGroup(index=0, count=1)\n"


@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI, {**POD, "JOB_COMPLETION_INDEX": "1"}, {"SLURM_NTASKS": "4"}])
def test_jax_finds_clusters(started, environment):
    (options,) = started(environment)
    assert options["heartbeat_timeout_seconds"] == 7
    assert options["initialization_timeout"] > 50
    assert "coordinator_address" not in options


def test_flags_take_precedence_over_the_cluster(started):
    (options,) = started(SLURM, "here:1", 2, 1)
    assert (options["coordinator_address"], options["num_processes"], options["process_id"]) == ("here:1", 2, 1)
    assert options["cluster_detection_method"] == "deactivate"  # else JAX would take one GPU only


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("here:1", None, None), "needs --coordinator HOST:PORT, --processes N and --process I"),
        ((None, 2, 0), "needs --coordinator HOST:PORT, --processes N and --process I"),
        (("here:1", 2, 2), "--process 2 must be between 0 and 1 with --processes 2"),
        (("here:1", 2, -1), "--process -1 must be between 0 and 1"),
        (("here", 2, 0), "--coordinator 'here' must have the form HOST:PORT, such as node1:9876"),
        (("here:99999", 2, 0), "--coordinator 'here:99999' must have the form HOST:PORT"),
    ],
)
def test_mistakes_in_flags(started, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        started((), *flags)


def test_the_port_is_in_use(started):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on port {port} .Address already in use.; write another"):
            started((), f"here:{port}", 2, 0)


def test_a_cluster_that_jax_cannot_use(monkeypatch, tmp_path):
    def initialize(**options):
        raise KeyError("job-name")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UserError, match="cannot connect the processes .'job-name'.; write --coordinator"):
        multihost.start(ParallelConfig(), tmp_path / "run", "here:1", 2, 1)


def wait_for_others(run, index, seconds) -> None:
    with multihost.roll_call(run, index, 4, seconds):
        time.sleep(60)


@pytest.mark.slow
def test_missing_processes_are_named(tmp_path, capfd):
    """One of four processes waits; the new file of another is counted, and that of an earlier start is not."""
    run = tmp_path / "runs" / "mine"
    new, stale = (run.with_name(".mine.start") / index for index in "23")
    stale.parent.mkdir(parents=True)
    for file, touched in ((new, time.time() + 60), (stale, 0)):
        file.write_text(f"node{file.name}")
        os.utime(file, (touched, touched))
    waiting = multiprocessing.get_context("spawn").Process(target=wait_for_others, args=(run, 1, 2))
    waiting.start()
    waiting.join(30)
    assert waiting.exitcode == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "error: processes 0, 3 of 4 did not start within 2 s (parallel.start_seconds)" in line
    assert f"or cannot see {run.parent}" in line
    assert line.endswith(f"started: 1 on {HOST}, 2 on node2")


def appears(path) -> bool:
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


def test_no_files_remain_next_to_the_run_folder(tmp_path, monkeypatch):
    """While a process waits, it writes its file again and again."""
    monkeypatch.setattr(multihost, "BEAT_SECONDS", 0.1)
    runs = tmp_path / "runs"
    own = runs / ".mine.start" / "0"
    with multihost.roll_call(runs / "mine", 0, 1, seconds=60):
        assert appears(own)
        own.unlink()
        assert appears(own)
        assert [path.name for path in runs.iterdir()] == [".mine.start"]
    assert not list(runs.iterdir())
    (runs / ".mine.start").mkdir()  # by a process that has left
    with multihost.roll_call(runs / "mine", 0, 1, seconds=60):
        pass
    assert not list(runs.iterdir())


COUNT = 3
HOST = socket.gethostname()


@pytest.fixture
def together(monkeypatch):
    """Runs a function in threads that act as the processes of a group; returns their results, or `UserError`s."""
    barrier, given, own = threading.Barrier(COUNT, timeout=10), [None] * COUNT, threading.local()

    def gather(value):
        given[own.index] = value
        barrier.wait()
        actual = np.stack(given)  # of equal shapes only, as in JAX
        barrier.wait()
        return actual

    monkeypatch.setattr(multihost.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(multihost.multihost_utils, "broadcast_one_to_all", lambda value: gather(value)[0])

    def run(task):
        def act(index):
            own.index = index
            try:
                return task(ProcessGroup(index, COUNT))
            except UserError as error:
                return str(error)

        with ThreadPoolExecutor(COUNT) as pool:
            return list(pool.map(act, range(COUNT)))

    return run


def failing(message):
    raise UserError(message)


def test_texts_of_different_lengths_are_gathered_in_order(together):
    assert together(lambda group: group.all_gather("\u00e9" * group.index)) == [["", "\u00e9", "\u00e9\u00e9"]] * COUNT


def test_only_process_0_computes_a_broadcast_value(together):
    made = []
    assert together(lambda group: group.broadcast(lambda: made.append(group.index) or "\u00fc!")) == ["\u00fc!"] * COUNT
    assert made == [0]


def test_an_error_of_one_process_is_raised_in_all(together):
    assert together(lambda group: group.run(lambda: group.index)) == [0, 1, 2]
    actual = together(lambda group: group.run(lambda: failing("no space") if group.index == 1 else None))
    assert actual == [f"process 1 (host {HOST}): no space"] * COUNT
    assert together(lambda group: group.run(lambda: failing("no data"))) == ["no data"] * COUNT


def test_the_first_setting_that_differs_is_named(together):
    assert together(lambda group: group.check_equal({"b": "x", "a": 1})) == [None] * COUNT
    actual = together(lambda group: group.check_equal({"c": group.index, "b": "x" if group.index < 2 else "y", "a": 1}))
    assert actual == [f"process 1 (host {HOST}): c=1, but process 0 has 0; start all processes the same way"] * COUNT
    actual = together(lambda group: group.check_equal({"a": 1} if group.index else {"a": 1, "b": 2}))
    assert "b=unset, but process 0 has 2" in actual[0]


def test_a_folder_that_is_not_shared_is_named(together, tmp_path, monkeypatch):
    monkeypatch.setattr(multihost, "VISIBLE_SECONDS", 0.3)
    other = tmp_path / "other"
    other.mkdir()
    assert together(lambda group: group.check_shared(tmp_path)) == [None] * COUNT
    actual = together(lambda group: group.check_shared(other if group.index == 2 else tmp_path))
    assert set(actual) == {
        f"process 2 (host {HOST}): {other} is not shared with process 0; name a folder on shared storage with --run"
    }
    assert list(tmp_path.iterdir()) == [other] and not list(other.iterdir())


def test_a_single_process_does_not_communicate(tmp_path):
    alone = multihost.SINGLE
    assert (alone.first, alone.count, alone.run(lambda: 5)) == (True, 1, 5)
    with pytest.raises(UserError, match="^no space$"):
        alone.run(lambda: failing("no space"))
    alone.check_shared(tmp_path / "missing")
    alone.barrier("none")
    assert [alone.should_stop(3, requested) for requested in (True, False)] == [True, False]


def test_several_processes_stop_and_wait_together(monkeypatch):
    """JAX agrees on the step at which all stop, regardless of the signals that this process received."""
    waited = []
    monkeypatch.setattr(multihost.multihost_utils, "reached_preemption_sync_point", lambda step: step == 4)
    monkeypatch.setattr(multihost.multihost_utils, "sync_global_devices", waited.append)
    group = ProcessGroup(1, 2)
    assert [group.should_stop(step, requested) for step, requested in ((3, True), (4, False))] == [False, True]
    group.barrier("saved")
    assert (group.first, waited) == (False, ["saved"])
