"""Ends a command on Ctrl-C with one line and status 130, at any time.

Python's default handling is not sufficient: an exception raised inside a callback is lost, and XLA threads that are
still running crash while the interpreter shuts down. This module imports little, so that it is soon in effect.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

STATUS = 130
GRACE = 2.0
"""Seconds for the command to close its files."""
RETRY = 0.01
"""Seconds until an exception that was lost is raised again."""


def install() -> None:
    """Ends the process on SIGINT; for the start of a command, when there is nothing to close."""
    _handle(_end)


def install_gently() -> None:
    """Raises KeyboardInterrupt on the first SIGINT, and ends the process after `GRACE` seconds or on the next one."""
    _handle(_interrupt)
    sys.unraisablehook = _raise_later


def _handle(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in background commands of shell scripts
        signal.signal(signal.SIGINT, handler)


def _raise_later(unraisable: Any) -> None:
    """Raises a KeyboardInterrupt again that a destructor or a callback of the garbage collector could not raise."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import threading

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)
    timer = threading.Timer(RETRY, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Context manager in which Ctrl-C raises KeyboardInterrupt and does nothing else."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end() -> NoReturn:
    """Ends the process immediately, without shutting down the interpreter."""
    with contextlib.suppress(Exception):
        print("interrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.terminate()
    os._exit(STATUS)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    end()


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    import threading

    signal.signal(signal.SIGINT, _end)
    timer = threading.Timer(GRACE, end)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt
