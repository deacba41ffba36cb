"""Ends a command on Ctrl-C with one line and status 130, at any time.

Nothing is raised: Python loses an exception in a callback, compiled modules that are being imported crash on one, and
XLA threads that are still running crash while the interpreter shuts down. Files survive, as they survive `kill -9`.
This module imports little, so that it is soon in effect.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

STATUS = 130


def install_handler() -> None:
    """Ends the process on SIGINT."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in background commands of shell scripts
        signal.signal(signal.SIGINT, lambda *_: end_process())


@contextlib.contextmanager
def raising_interrupts() -> Iterator[None]:
    """Context manager in which Ctrl-C raises KeyboardInterrupt and does nothing else."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_process() -> NoReturn:
    """Ends the process immediately, without shutting down the interpreter."""
    with contextlib.suppress(Exception):
        print("interrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.terminate()
    if "tformer_jax.base.programs" in sys.modules:
        sys.modules["tformer_jax.base.programs"].kill_all()
    os._exit(STATUS)
