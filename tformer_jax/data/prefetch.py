"""Prefetches batches in a background thread and measures the time spent waiting for them."""

import copy
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

Batch = dict[str, np.ndarray]
Item = tuple[Batch | None, Any, Exception | None]
"""A batch and the state after it, or an error; neither at the end."""
NICENESS = 10
"""The Unix niceness of the thread; a higher one of the process is kept."""


class Prefetched(Iterator[Batch]):
    """Iterator that prefetches up to `size` batches; its state is the one after the last batch returned."""

    def __init__(self, batches: grain.DatasetIterator, size: int):
        self._batches, self._size = batches, size
        self._state = batches.get_state()
        self._ready: queue.Queue[Item] = queue.Queue(size)
        self._peeked: Item | None = None
        self._peeking = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.waited = 0.0
        """Seconds spent in `__next__` waiting for a batch."""

    def start(self) -> None:
        """Starts prefetching."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._fill, daemon=True, name="batches")
            self._thread.start()

    def __next__(self) -> Batch:
        batch, state, error = self._peeked or self._get()
        self._peeked = None
        if batch is None:
            self._join()
            raise error or StopIteration
        self._state = state
        return batch

    def peek(self) -> Batch | None:
        """Returns the batch that `__next__` will return, in any thread; None if it will raise."""
        with self._peeking:
            self._peeked = self._peeked or self._get()
            return self._peeked[0]

    def get_state(self) -> Any:
        """Returns the state after the last batch returned."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Continues with the batches that followed `get_state`."""
        self._join()
        self._batches.set_state(state)
        self._state = self._batches.get_state()

    def close(self) -> None:
        """Stops the thread and closes the data loader."""
        self._join()
        self._batches.close()

    def _get(self) -> Item:
        self.start()
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            start = time.perf_counter()
            item = self._ready.get()
            self.waited += time.perf_counter() - start
            return item

    def _fill(self) -> None:
        try:
            _yield_to_computation()
            while not self._stop.is_set():
                batch = next(self._batches)
                self._put((batch, copy.deepcopy(self._batches.get_state()), None))
        except StopIteration:
            self._put((None, None, None))
        except Exception as error:
            self._put((None, None, error))

    def _put(self, item: Item) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue

    def _join(self) -> None:
        """Stops the thread and discards the prefetched batches."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._ready, self._peeked = queue.Queue(self._size), None


def _yield_to_computation() -> None:
    """Lowers the priority of this thread on Linux, where it takes effect on one thread.

    Batches are made ahead of time; a train step on the CPU would wait for the core on which one is made.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
