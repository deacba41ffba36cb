"""Trains one model with several processes, by `jax.distributed` and `jax.experimental.multihost_utils`.

Adds error messages that name a process that has not started, the first setting that differs between processes, or a
folder that is not shared.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from tformer_jax.base.errors import UserError, list_names, one_line
from tformer_jax.base.paths import is_remote
from tformer_jax.base.workarounds import port_problem
from tformer_jax.config import ParallelConfig

T = TypeVar("T")
FLAGS = "--coordinator HOST:PORT, --processes N and --process I"
LAUNCHERS = (("SLURM_NTASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))
"""Environment variables of Slurm and Open MPI: the number of processes, and the index of this one."""
NO_CLUSTER = ("coordinator_address", "must be called before any JAX calls")
"""Parts of JAX's errors if it finds no cluster, or if this process has already used JAX, as in a notebook."""
LATE = 1
"""Exit status if processes are missing; they may only be late, so that a restart may succeed."""
BEAT_SECONDS = 1.0
"""Interval at which a waiting process touches its file."""
STALE_SECONDS = 10
"""Age at which such a file is ignored."""
VISIBLE_SECONDS = 60
"""Time after which a new file on a network file system must be visible on other hosts."""


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """All processes of a run, by default only this one. Every process must call the methods in the same order."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is process 0, which writes the files of the run."""
        return self.index == 0

    def all_gather(self, text: str) -> list[str]:
        """Returns the texts of all processes, ordered by index."""
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.int32(len(data)))
        padded = np.pad(data, (0, sizes.max() - len(data)))
        rows = multihost_utils.process_allgather(padded)
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, make: Callable[[], str]) -> str:
        """Returns the result of `make` in process 0; the other processes do not call it."""
        data = np.frombuffer(make().encode() if self.first else b"", np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
        padded = data if self.first else np.zeros(size, np.uint8)
        return multihost_utils.broadcast_one_to_all(padded).tobytes().decode()

    def run(self, action: Callable[[], T]) -> T:
        """Runs `action` in every process; a `UserError` in one process is raised in all of them."""
        if self.count == 1:
            return action()
        result, problem = None, ""
        try:
            result = action()
        except UserError as error:
            problem = str(error)
        problems = [json.loads(text) for text in self.all_gather(json.dumps([socket.gethostname(), problem]))]
        for index, (host, problem) in enumerate(problems):
            if problem:
                everywhere = all(other == problem for _, other in problems)
                raise UserError(problem if everywhere else f"process {index} (host {host}): {problem}")
        return result  # type: ignore[return-value]

    def from_first(self, find: Callable[[], T]) -> T:
        """Returns what `find` returns in process 0, in all processes; its `UserError` is raised in all of them.

        Args:
            find: returns values that JSON can represent.
        """
        value = self.run(lambda: find() if self.first else None)
        return json.loads(self.broadcast(lambda: json.dumps(value)))

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises `UserError` in all processes if their `facts` differ, naming the first difference."""
        mine = {key: repr(value) for key, value in facts.items()}
        expected = json.loads(self.broadcast(lambda: json.dumps(mine)))

        def compare() -> None:
            for key in sorted(expected.keys() | mine.keys()):
                own, other = mine.get(key, "unset"), expected.get(key, "unset")
                if own != other:
                    raise UserError(f"{key}={own}, but process 0 has {other}; start all processes the same way")

        self.run(compare)

    def check_shared(self, folder: Path) -> None:
        """Raises `UserError` in all processes unless all of them see `folder`, which process 0 has created."""
        if self.count == 1 or is_remote(folder):
            return
        marker = folder / self.broadcast(lambda: f".shared_{uuid.uuid4().hex}")
        if self.first:
            marker.touch()

        def look() -> None:
            deadline = time.monotonic() + VISIBLE_SECONDS
            while not marker.exists():
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{folder} is not shared with process 0; name a folder on shared storage with --run"
                    )
                time.sleep(0.1)

        try:
            self.run(look)
        finally:
            if self.first:
                marker.unlink()

    def barrier(self, name: str) -> None:
        """Blocks until all processes call it."""
        if self.count > 1:
            multihost_utils.sync_global_devices(name)

    def should_stop(self, step: int, requested: bool) -> bool:
        """Returns whether to stop before `step`, the same in all processes; for several, JAX handles SIGTERM."""
        return requested if self.count == 1 else multihost_utils.reached_preemption_sync_point(step)


SINGLE = ProcessGroup()


def start(
    cfg: ParallelConfig, folder: Path, coordinator: str | None, processes: int | None, process: int | None
) -> ProcessGroup:
    """Connects to the processes that the flags name or, without flags, to a cluster that JAX detects.

    With neither, the group has only this process.

    Args:
        folder: shared run folder, beside which the processes leave a file each until all have started.

    Raises:
        UserError: the flags are incomplete or contradict each other, or JAX cannot connect the processes.
    """
    given = any(flag is not None for flag in (coordinator, processes, process))
    if (coordinator, processes, process) in ((None, 1, None), (None, 1, 0)) or (not given and _single_by_environment()):
        return SINGLE
    options: dict[str, Any] = {}
    if given:
        _check_flags(coordinator, processes, process)
        options = {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
        options["cluster_detection_method"] = "deactivate"
    index, count = (process, processes) if given else _place_by_launcher()
    try:
        with roll_call(folder, index, count, cfg.start_seconds):
            jax.distributed.initialize(
                **options,
                initialization_timeout=cfg.start_seconds + 3 * STALE_SECONDS,
                heartbeat_timeout_seconds=cfg.lost_seconds,
                shutdown_timeout_seconds=cfg.lost_seconds,
            )
    except Exception as error:  # cluster libraries raise various types
        if not given and any(sign in str(error) for sign in NO_CLUSTER):
            return SINGLE
        reason = one_line(error)
        raise UserError(
            f"JAX cannot connect the processes ({reason}); write {FLAGS}, with a port that is free, or --processes 1"
        ) from error
    return ProcessGroup(jax.process_index(), jax.process_count())


@contextlib.contextmanager
def roll_call(folder: Path, index: int | None, count: int | None, seconds: int) -> Iterator[None]:
    """Exits with an error that names the missing processes if the block is not left within `seconds`.

    JAX aborts without naming them. While it waits, each process touches a file beside the run folder; a bucket has no
    such files.
    """
    if index is None or count is None or is_remote(folder):
        yield
        return
    markers = folder.with_name(f".{folder.name}.start")
    connected = threading.Event()

    def wait() -> None:
        deadline = time.monotonic() + seconds
        while not connected.wait(BEAT_SECONDS):
            markers.mkdir(parents=True, exist_ok=True)
            new = markers / f".{index}"
            new.write_text(socket.gethostname(), encoding="utf-8")
            new.replace(markers / str(index))  # others read either the earlier file or the complete one
            if time.monotonic() > deadline:
                print(f"error: {_describe_missing(markers, index, count, seconds)}", file=sys.stderr, flush=True)
                if index == 0:  # processes that started later must be able to report it, too
                    time.sleep(STALE_SECONDS)
                os._exit(LATE)

    thread = threading.Thread(target=wait, daemon=True, name="roll call")
    thread.start()
    try:
        yield
    finally:
        connected.set()
        thread.join()
        with contextlib.suppress(OSError):
            (markers / str(index)).unlink(missing_ok=True)
            markers.rmdir()


def _describe_missing(markers: Path, index: int, count: int, seconds: int) -> str:
    now = (markers / str(index)).stat().st_mtime
    started = {int(file.name): file for file in markers.glob("[0-9]*") if now - file.stat().st_mtime < STALE_SECONDS}
    absent = [str(number) for number in range(count) if number not in started]
    hosts = ", ".join(f"{number} on {file.read_text(encoding='utf-8')}" for number, file in sorted(started.items()))
    shown = list_names(absent, 20)
    if not absent:
        return (
            f"all {count} processes have started, but could not connect within {seconds} s (parallel.start_seconds); "
            f"check that --coordinator is the address of process 0 and that its port is open; started: {hosts}"
        )
    return (
        f"processes {shown} of {count} did not start within {seconds} s (parallel.start_seconds) or cannot see "
        f"{markers.parent}; started: {hosts}"
    )


def _single_by_environment() -> bool:
    """Returns whether the environment shows a single process, which JAX would reject or restrict to one GPU."""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "TPU_WORKER_ID" not in os.environ
    return (in_pod and "JOB_COMPLETION_INDEX" not in os.environ) or _place_by_launcher()[1] == 1


def _place_by_launcher() -> tuple[int | None, int | None]:
    """Returns the index of this process and the number of processes, if Slurm or Open MPI set them."""
    for count, index in LAUNCHERS:
        if os.environ.get(count, "").isdecimal() and os.environ.get(index, "").isdecimal():
            return int(os.environ[index]), int(os.environ[count])
    return None, None


def _check_flags(coordinator: str | None, processes: int | None, process: int | None) -> None:
    if coordinator is None or processes is None or process is None:
        raise UserError(f"training with several processes needs {FLAGS}, or --processes 1 for one")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator {coordinator!r} must have the form HOST:PORT, such as node1:9876")
    if not 0 <= process < processes:
        raise UserError(f"--process {process} must be between 0 and {processes - 1} with --processes {processes}")
    if process == 0 and (reason := port_problem(int(port))):
        raise UserError(
            f"process 0 cannot listen on port {int(port)} ({reason}); write another port in "
            "--coordinator HOST:PORT of all processes"
        )
