"""Ctrl-C ends a command with one line and status 130, at any moment.

The interpreter's own way is not enough: an exception that is raised inside a callback is lost, and threads of XLA that
still run while the interpreter is taken down crash.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

STATUS = 130
GRACE = 2.0
"""Seconds that the command has to close its files in."""


def install() -> None:
    """Ends the process at SIGINT: for its beginning, when there is nothing to close."""
    _handle(_end)


def install_gently() -> None:
    """Raises KeyboardInterrupt at the first SIGINT, for at most `GRACE` seconds, and ends the process at the next."""
    _handle(_interrupt)


def _handle(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a command in the background of a shell script
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt inside, and do nothing else."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end() -> NoReturn:
    """Ends the process at once, without the interpreter's own end."""
    with contextlib.suppress(Exception):
        print("interrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(STATUS)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    end()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, _end)
    timer = threading.Timer(GRACE, end)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt
