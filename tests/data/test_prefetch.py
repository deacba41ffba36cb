"""Prefetched batches: their order, the state of the batches returned, and the measured waiting time."""

import gc
import sys
import threading
import time
import weakref

import pytest

from tformer_jax.data import prefetch
from tformer_jax.data.prefetch import Prefetched


class Numbers:
    """Counts up; each number may take time or fail."""

    def __init__(self, stop: int = 100, pause: float = 0.0, broken_at: int | None = None):
        self.next, self.stop, self.pause, self.broken_at, self.closed = 0, stop, pause, broken_at, False

    def __next__(self):
        if self.next == self.broken_at:
            raise ValueError("broken")
        if self.next == self.stop:
            raise StopIteration
        time.sleep(self.pause)
        self.next += 1
        return {"number": self.next - 1}

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]

    def close(self):
        self.closed = True


def numbers(batches, count):
    return [next(batches)["number"] for _ in range(count)]


def test_order_and_state_are_those_of_the_batches_given():
    batches = Prefetched(Numbers(), 4)
    assert batches.get_state() == {"next": 0}
    assert numbers(batches, 5) == [0, 1, 2, 3, 4]
    state = batches.get_state()
    assert state == {"next": 5}
    assert numbers(batches, 3) == [5, 6, 7]
    batches.set_state(state)
    assert numbers(batches, 3) == [5, 6, 7]
    batches.close()


def test_peeking_consumes_nothing():
    batches = Prefetched(Numbers(stop=2), 4)
    assert [batches.peek(), batches.peek()] == [{"number": 0}] * 2
    assert batches.get_state() == {"next": 0}
    assert numbers(batches, 1) == [0]
    batches.peek()
    batches.set_state({"next": 0})
    assert batches.peek() == {"number": 0}
    assert numbers(batches, 2) == [0, 1]
    assert batches.peek() is None
    with pytest.raises(StopIteration):
        next(batches)


def test_two_threads_peek_at_one_batch():
    batches, actual = Prefetched(Numbers(pause=0.05), 4), []
    threads = [threading.Thread(target=lambda: actual.append(batches.peek())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == [{"number": 0}] * 2
    assert numbers(batches, 2) == [0, 1]


def test_the_end_and_errors_arrive():
    batches = Prefetched(Numbers(stop=3), 8)
    assert [batch["number"] for batch in batches] == [0, 1, 2]
    broken = Prefetched(Numbers(broken_at=2), 8)
    assert numbers(broken, 2) == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(broken)


def test_only_time_without_a_ready_batch_is_waiting():
    slow = Prefetched(Numbers(pause=0.05), 2)
    numbers(slow, 3)
    assert 0.08 < slow.take_waited() < 1
    assert slow.take_waited() == 0, "it is counted from the last call on"
    slow.close()
    fast = Prefetched(Numbers(), 2)
    fast.start()
    time.sleep(0.2)
    numbers(fast, 1)
    assert fast.take_waited() < 0.1
    fast.close()


def test_closing_ends_the_thread_and_the_loader():
    loader, before = Numbers(), set(threading.enumerate())
    batches = Prefetched(loader, 2)
    next(batches)
    (thread,) = set(threading.enumerate()) - before
    batches.close()
    assert loader.closed
    assert not thread.is_alive()


def test_closing_deletes_the_loader():
    """Regression test: Grain's iterators failed when they were deleted after the modules of Python, at its exit."""
    loader = Numbers()
    batches, alive = Prefetched(loader, 2), weakref.ref(loader)
    del loader
    assert numbers(batches, 3) == [0, 1, 2] and alive() is not None
    batches.close()
    batches.close()
    gc.collect()
    assert alive() is None and batches.get_state() == {"next": 3}


@pytest.mark.parametrize(("niceness", "expected"), [(0, 10), (15, 15)])
def test_the_priority_of_the_thread_is_never_raised(monkeypatch, niceness, expected):
    changes = []
    monkeypatch.setattr("os.getpriority", lambda *_: niceness)
    monkeypatch.setattr("os.setpriority", lambda *given: changes.append(given[-1]))
    prefetch._lower_priority()
    assert changes == ([expected] if sys.platform == "linux" else [])


def test_a_thread_that_cannot_start_reading_says_why(monkeypatch):
    def refuse():
        raise PermissionError("refused")

    monkeypatch.setattr(prefetch, "_lower_priority", refuse)
    with pytest.raises(PermissionError, match="refused"):
        next(Prefetched(Numbers(), 2))
