"""Child processes that stop with the command that started them."""

import ctypes
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
PARENT_DEATH_SIGNAL = 1
"""Option of Linux's `prctl` for the signal that a process gets when its parent ends."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Children:
    """Context that runs child processes; a signal to this process sends SIGTERM to them, and no more are started.

    Each has its own process group. Otherwise, it would also receive the terminal's Ctrl-C, and a second signal ends a
    training run without a checkpoint. On Linux, they also stop if this process is killed.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        """The number of the signal; None: there was none."""
        self._running: list[subprocess.Popen] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Children":
        wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._stop) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, command: list[str], **options: Any) -> int:
        """Runs a command to its end, in any thread, and returns its status."""
        with subprocess.Popen(command, process_group=0, preexec_fn=_stop_with_parent, **options) as process:
            self._running.append(process)
            if self.stopped_by is not None:  # the signal came while the process was started
                process.terminate()
            process.wait()
            self._running.remove(process)
        return process.returncode

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = number
        for process in [*self._running]:
            process.terminate()


def _stop_with_parent() -> None:
    if LIBRARY is not None:
        LIBRARY.prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
