"""Safeguards of long runs: a lock on the run folder, and a watchdog for hung steps."""

import contextlib
import faulthandler
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import is_remote, resolved

HUNG = 3
"""Exit status after a hung step."""
REPORT_SECONDS = 10
"""Time to record a hung step: the file system may hang, too."""


def is_locked(run: Path) -> bool:
    """Returns whether a process holds the lock of a run folder, because a run is in progress."""
    try:
        with lock_path(run).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock_path(run: Path) -> Path:
    """Returns the path of the lock of a run folder, beside the folder itself if `run` is a symbolic link."""
    folder = resolved(run)
    return folder.with_name(f".{folder.name}.lock")


class FolderLock:
    """An exclusive `flock` for a folder, released by the operating system when the process ends."""

    def __init__(self, run: Path, flag: str = "run folder"):
        """Acquires the lock of the folder that `flag` names.

        Raises:
            UserError: another process holds the lock, or the file system cannot create it.
        """
        path = lock_path(run)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path.parent} cannot be written ({error.strerror}); name another folder") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            raise UserError(f"{run} is in use by {owner}: wait for it to end, or choose another {flag}") from None
        except OSError as error:
            raise UserError(
                f"{path} cannot be locked ({error.strerror}): name a {flag} on a file system that supports flock"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()

    def release(self) -> None:
        """Releases the lock."""
        self._file.close()


@contextlib.contextmanager
def locked(run: Path, flag: str = "run folder") -> Iterator[None]:
    """Context that holds a `FolderLock`, except in a bucket, which has none."""
    with contextlib.ExitStack() as on_exit:
        if not is_remote(run):
            on_exit.callback(FolderLock(run, flag).release)
        yield


class Watchdog:
    """Ends the process and prints the stacks of its threads if a step takes longer than `seconds`; 0 disables it.

    A collective that waits for a lost host never returns, so the process ends by `os._exit`. Time in which the whole
    process is stopped, as by Ctrl-Z, does not count.

    Args:
        report: is called with what happened before the process ends.
    """

    def __init__(self, seconds: int, report: Callable[[str], None] = lambda problem: None):
        self._seconds, self._paused, self._beats, self._report = seconds, True, 0, report
        self._shapes: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()
        self._over = threading.Event()
        if seconds:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def beat(self) -> None:
        """Marks the end of a step and the start of the next one."""
        self._beats += 1
        self._paused = False  # after the beat, since `_watch` reads this first

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends the watchdog during work of unknown duration, such as an evaluation."""
        before, self._paused = self._paused, True
        yield
        if not before:
            self.beat()

    def around_step(self, batch: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Returns the context of a step: paused for the first batch of each shape, for which the step is compiled."""
        shapes = tuple((name, rows.shape) for name, rows in batch.items())
        if shapes in self._shapes:
            return contextlib.nullcontext()
        self._shapes.add(shapes)
        return self.paused()

    def close(self) -> None:
        """Stops the watchdog."""
        self._over.set()

    def _watch(self) -> None:
        interval, beats, quiet = min(self._seconds / 4, 10), 0, 0.0
        while not self._over.wait(interval):
            if self._paused or self._beats != beats:
                beats, quiet = self._beats, 0.0
                continue
            quiet += interval
            if quiet >= self._seconds:
                self._end()

    def _end(self) -> None:
        problem = f"no step ended within train.hang_seconds={self._seconds}"
        advice = "the same command with --resume continues from the last checkpoint"
        print(f"error: {problem}; {advice}. Stack traces of all threads:", file=sys.stderr)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        reporting = threading.Thread(target=self._report, args=(problem,), daemon=True)
        reporting.start()
        reporting.join(REPORT_SECONDS)
        os._exit(HUNG)
