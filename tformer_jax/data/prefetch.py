"""Prefetches batches in a background thread and measures the time spent waiting for them."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

Batch = dict[str, np.ndarray]
NICENESS = 10
"""The Unix niceness of the thread; a higher one of the process is kept."""


class Prefetched(Iterator[Batch]):
    """Iterator that prefetches up to `size` batches; its state is the one after the last batch returned."""

    def __init__(self, batches: grain.DatasetIterator, size: int):
        self._loader = batches
        self._batches = grain.experimental.ThreadPrefetchDatasetIterator(_LowPriority(batches), size)
        self._state = batches.get_state()
        self._peeked: tuple[Batch | None, Exception | None] | None = None
        self._peeking = threading.Lock()
        self.waited = 0.0
        """Seconds spent in `__next__` and `peek` waiting for a batch."""

    def start(self) -> None:
        """Starts prefetching."""
        self._batches.start_prefetch()

    def __next__(self) -> Batch:
        batch, error = self._peeked or self._get()
        self._peeked = None
        if error is not None:
            raise error
        assert batch is not None
        self._state = self._batches.get_state()
        return batch

    def peek(self) -> Batch | None:
        """Returns the batch that `__next__` will return, in any thread; None if it will raise."""
        with self._peeking:
            self._peeked = self._peeked or self._get()
            return self._peeked[0]

    def take_waited(self) -> float:
        """Returns the seconds waited for batches since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def get_state(self) -> Any:
        """Returns the state after the last batch returned."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Continues with the batches that followed `get_state`."""
        self._batches.set_state(state)
        self._state, self._peeked = self._batches.get_state(), None

    def close(self) -> None:
        """Stops the thread and closes the data loader.

        Grain's iterators are deleted, since they fail with a message if that is done after the end of its modules.
        """
        for name in ("_batches", "_loader"):
            if iterator := vars(self).pop(name, None):
                iterator.close()

    def _get(self) -> tuple[Batch | None, Exception | None]:
        start = time.perf_counter()
        try:
            return next(self._batches), None
        except Exception as error:  # StopIteration at the end
            return None, error
        finally:
            self.waited += time.perf_counter() - start


class _LowPriority:
    """Lowers the priority of the thread that reads `batches` on Linux, where it takes effect on one thread.

    Batches are made ahead of time; a train step on the CPU would wait for the core on which one is made.
    """

    def __init__(self, batches: grain.DatasetIterator):
        self._batches, self._thread = batches, threading.local()
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self) -> Batch:
        if not hasattr(self._thread, "niceness"):
            self._thread.niceness = _lower_priority()
        return next(self._batches)


def _lower_priority() -> int | None:
    """Returns the new niceness of this thread; None if it cannot be set for one thread."""
    if sys.platform != "linux":
        return None
    thread = threading.get_native_id()
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
    return niceness
