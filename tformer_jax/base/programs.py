"""Programs of the user, which run while a command waits for their output."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

_running: list[subprocess.Popen[str]] = []


def run(words: Sequence[str], text: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a program with a text as its input, and captures its output.

    It has its own process group, since the terminal's Ctrl-C would end it at once, and with it an evaluation that
    training finishes before it stops. It ends with all processes that it started if there is an exception.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it does not end within `seconds`.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, process_group=0, encoding="utf-8", errors="replace", **pipes) as process:  # type: ignore[call-overload]
        _running.append(process)
        try:
            output, errors = process.communicate(text, timeout=seconds)
        except BaseException:
            _kill(process)
            raise
        finally:
            _running.remove(process)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def kill_all() -> None:
    """Kills all running programs, because this process ends."""
    for process in [*_running]:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
