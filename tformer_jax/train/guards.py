"""What keeps a long run from harm: one process a folder, an alarm for steps that hang, an eye on the loss."""

import contextlib
import faulthandler
import fcntl
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tformer_jax.config import ConfigError

HUNG = 3
"""Exit status of a run that hung."""


class FolderLock:
    """An exclusive `flock` on a run folder, which the operating system releases when its process ends."""

    def __init__(self, run: Path):
        """Locks `run`.

        Raises:
            ConfigError: another process holds the lock, or the file system has none.
        """
        path = run.with_name(f".{run.name}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path.parent} cannot be written ({error.strerror}); name another folder") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            raise ConfigError(f"{run} is in use by {owner}: wait for it to end, or name another --run") from None
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be locked ({error.strerror}): name a --run on a file system that supports flock"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()

    def release(self) -> None:
        """Unlocks the folder."""
        self._file.close()


class Watchdog:
    """Ends the process, with the stacks of all its threads, when a step takes longer than `seconds` (0: never).

    A collective that waits for a lost host never returns, so that nothing gentler would help.
    """

    def __init__(self, seconds: int):
        self._seconds, self._paused = seconds, True
        self._last = time.monotonic()
        self._over = threading.Event()
        if seconds:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def beat(self) -> None:
        """A step is done; the next one begins."""
        self._last, self._paused = time.monotonic(), False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While something goes on whose length nobody knows: compiling, an evaluation."""
        self._paused = True
        yield
        self.beat()

    def close(self) -> None:
        """Ends the watch."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(self._seconds / 4, 10)):
            if not self._paused and time.monotonic() - self._last > self._seconds:
                print(
                    f"error: no step ended within train.hang_seconds={self._seconds}; the threads stand here, and the "
                    "same command with --resume goes on from the last checkpoint:",
                    file=sys.stderr,
                )
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                os._exit(HUNG)


class SpikeDetector:
    """Notices a loss far above the losses before it, by their running mean and deviation."""

    DECAY, DEVIATIONS, LEAST_STEPS, LEAST_RISE = 0.9, 6.0, 50, 0.2

    def __init__(self, *, mean: float = 0.0, variance: float = 0.0, count: int = 0):
        self._mean, self._variance, self._count = mean, variance, count

    def state(self) -> dict[str, Any]:
        """The arguments of a detector that goes on from here."""
        return {"mean": self._mean, "variance": self._variance, "count": self._count}

    def sees(self, loss: float) -> str | None:
        """What is to be said of the loss of the next step, if anything; it has no part in the mean then."""
        if not math.isfinite(loss):
            return None
        bound = self._mean + max(self.DEVIATIONS * math.sqrt(self._variance), self.LEAST_RISE)
        if self._count >= self.LEAST_STEPS and loss > bound:
            return f"loss {loss:.4f} is far above the {self._mean:.4f} of the steps before"
        self._count += 1
        keep = min(self.DECAY, 1 - 1 / self._count)
        difference = loss - self._mean
        self._mean += (1 - keep) * difference
        self._variance = keep * (self._variance + (1 - keep) * difference**2)
        return None
