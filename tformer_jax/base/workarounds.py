"""Workarounds of faults of libraries: what each library does, and the version in which it was seen.

Workarounds of XLA, which need JAX, are in `nn.xla`. When a library no longer needs a workaround, remove it and its
calls.
"""

import contextlib
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def silence_orbax() -> None:
    """Hides the warnings of Orbax 0.12, which it logs as absl's, about options that are set on purpose."""
    logging.getLogger("absl").setLevel(logging.ERROR)


@contextlib.contextmanager
def silenced_orbax() -> Iterator[None]:
    """Context of `silence_orbax`, for use outside of commands."""
    logger = logging.getLogger("absl")
    level = logger.level
    silence_orbax()
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def first_failure_of_checkpoints() -> Iterator[None]:
    """Context that drops the tracebacks which threads print when a checkpoint cannot be read or written.

    Orbax 0.12 logs the error that it raises, and closes the event loop of what is pending; TensorStore 0.1.86's threads
    and the garbage collector report each of these. Some reports come later: after a failure they are dropped for the
    rest of the process.
    """
    report, loggers = sys.unraisablehook, [logging.getLogger(name) for name in ("asyncio", "absl")]

    def report_others(args: Any) -> None:
        if not _mentions_checkpoints("".join(traceback.format_exception(args.exc_value))):
            report(args)

    def log_others(record: logging.LogRecord) -> bool:
        return not _mentions_checkpoints(logging.Formatter().format(record))

    sys.unraisablehook = report_others
    for logger in loggers:
        logger.addFilter(log_others)
    yield
    sys.unraisablehook = report
    for logger in loggers:
        logger.removeFilter(log_others)


def _mentions_checkpoints(text: str) -> bool:
    return any(word in text for word in ("orbax", "tensorstore", "Event loop is closed"))


@contextlib.contextmanager
def import_prevented(module: str) -> Iterator[None]:
    """Context in which importing `module` raises ImportError, unless it is already imported.

    tensorboardX 2.6 imports torch where it is installed, which takes seconds, and works without it.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def silence_tensorboard() -> None:
    """Hides the warning of tensorboardX 2.6 about a value that is not finite, which does not name the value."""
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)


def mark_absl_flags_as_parsed() -> None:
    """Lets worker processes of grain 0.2.18 start in a program that does not parse absl's flags.

    grain reads a flag of its own, which absl refuses before flags are parsed (google/grain#1355).
    """
    from absl import flags

    flags.FLAGS.mark_as_parsed()


def port_problem(port: int) -> str | None:
    """Returns why this process cannot listen on a port, or None; JAX 0.10 sometimes crashes for a port in use."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def remove_unfinished_programs(folder: Path) -> None:
    """Removes entries of JAX's compilation cache whose writer was killed.

    JAX 0.10 does not read or replace an entry without its time of last use, and it prevents evictions.

    Raises:
        OSError: the folder cannot be written.
    """
    entry, used = "-cache", "-atime"
    import filelock  # loads in a tenth of a second, which --help can do without

    with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=0):
        names = {path.name for path in folder.iterdir()}
        for name in names:
            if name.endswith(entry) and name.removesuffix(entry) + used not in names:
                (folder / name).unlink()
