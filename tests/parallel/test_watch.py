"""How processes meet and agree, in threads of one process that share a store."""

import concurrent.futures
import threading
import time

import pytest

from tests.processes import free_port
from tformer_jax.config import ConfigError
from tformer_jax.parallel import lobby, watch
from tformer_jax.parallel.cluster import Place
from tformer_jax.parallel.watch import Watch


class Memory:
    """What a store does, without a coordinator."""

    def __init__(self) -> None:
        self.lock, self.values = threading.Lock(), dict[str, str]()

    def put(self, key: str, value: str) -> None:
        with self.lock:
            self.values[key] = value

    def all(self, folder: str) -> dict[int, str]:
        with self.lock:
            found = {key: value for key, value in self.values.items() if key.startswith(f"{folder}/")}
        return {int(key.rpartition("/")[2]): value for key, value in found.items()}


def together(count: int, seconds: float) -> list[Watch]:
    store = Memory()
    watches = [Watch(number, [f"host{number}" for number in range(count)], seconds) for number in range(count)]
    for each in watches:
        each.begin(store)
    return watches


@pytest.mark.parametrize("asked", [(0,), (2,), (0, 1, 2)])
def test_all_stop_at_the_same_step(asked):
    """Three loops of different speeds, none more than two steps before another, as collectives hold them."""
    watches, done = together(3, seconds=0.6), [0, 0, 0]

    def run(number: int) -> int:
        step = 0
        while not watches[number].stop_here(step, requested=number in asked and step >= 5):
            while step > min(done) + 2:
                time.sleep(0.001)
            time.sleep(0.001 * (number + 1))
            step += 1
            done[number] = step
            assert step < 10_000
        return step

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        steps = [future.result(timeout=60) for future in [threads.submit(run, number) for number in range(3)]]
    for each in watches:
        each.close()
    assert len(set(steps)) == 1
    assert steps[0] >= 5


def test_who_is_silent_is_lost(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(watch.os, "_exit", lambda status: ended.append(status))
    first, second = together(2, seconds=1)
    time.sleep(0.5)
    assert not ended
    second.close()
    deadline = time.monotonic() + 30
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    first.close()
    assert ended == [1]
    assert capfd.readouterr().err == (
        "error: process 1 (host host1) is lost: nothing was heard of it for 1 s (parallel.lost_seconds); the same "
        "commands with --resume go on from the last checkpoint\n"
    )


def test_who_ends_well_is_not_lost(monkeypatch):
    ended = []
    monkeypatch.setattr(watch.os, "_exit", lambda status: ended.append(status))
    first, second = together(2, seconds=1)
    second.end(None)
    second.close()
    time.sleep(2)
    first.end(None)
    first.close()
    assert not ended


def test_a_failure_is_told_to_the_others(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(watch.os, "_exit", lambda status: ended.append(status))
    first, second = together(2, seconds=6)
    second.end("data.txt does not exist", status=2)
    deadline = time.monotonic() + 30
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    for each in (first, second):
        each.close()
    assert ended == [2]
    assert capfd.readouterr().err == "error: process 1 (host host1) ended: data.txt does not exist\n"


def meeting(*places: Place, seconds: int = 30) -> list[list[str] | str]:
    """What each finds, or why it does not."""

    def meet(place: Place) -> list[str] | str:
        try:
            return lobby.meet(place, seconds)
        except ConfigError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(meet, places))


def test_all_meet():
    at = f"localhost:{free_port()}"
    found = meeting(*(Place(at, 3, number) for number in (2, 0, 1)))
    assert [len(hosts) for hosts in found] == [3, 3, 3]


def test_the_missing_are_named_with_the_hosts_of_the_job(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-4]")
    at = f"localhost:{free_port()}"
    first, third = meeting(Place(at, 4, 0), Place(at, 4, 2), seconds=2)
    assert first == third
    assert f"of 4 processes, 1, 3 did not come to {at} within 2 s" in first
    assert "the hosts of this job are node[1-4]" in first


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ((3, 1), "two processes were started as --process 1, on the hosts"),
        ((4, 3), "was started with --processes 4, process 0 with 3; start all with the same number"),
    ],
)
def test_contradictions_are_refused_and_the_others_go_on(wrong, sentence):
    at = f"localhost:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        others = threads.submit(meeting, Place(at, 3, 0), Place(at, 3, 1))
        time.sleep(1)
        assert sentence in meeting(Place(at, *wrong))[0]
        assert len(meeting(Place(at, 3, 2))[0]) == 3
        assert [len(hosts) for hosts in others.result()] == [3, 3]
