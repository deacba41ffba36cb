"""Objects in processes of their own, so that neither memory nor threads of one are those of another."""

import contextlib
import multiprocessing
import pkgutil
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tformer_jax.config import ConfigError
from tformer_jax.train.errors import RunError


class Remote:
    """An object in a spawned process, whose methods are called from here, one at a time.

    The process imports only the module of the object, and is idle between two calls.
    """

    def __init__(self, target: str, *arguments: Any):
        """Makes `target`, written `module:attribute`, from `arguments`; `seconds` is how long that took.

        Raises:
            ConfigError: as `target` raises it.
            RunError: `target` fails otherwise, or the process is killed.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._target = target
        self._process = context.Process(target=_serve, args=(theirs, target, arguments), daemon=True)
        start = time.perf_counter()
        self._process.start()
        theirs.close()
        self._receive()
        self.seconds = time.perf_counter() - start

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def call(self, method: str, *arguments: Any) -> Any:
        """What the object's method returns. Raises as `__init__` does."""
        self._pipe.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            error, value = self._pipe.recv()
        except EOFError as end:
            raise RunError(f"the process of {self._target} was killed, probably because memory ran out") from end
        if error is None:
            return value
        raise ConfigError(value) if error == ConfigError.__name__ else RunError(f"{self._target}: {error}: {value}")


def _serve(pipe: Any, target: str, arguments: tuple[Any, ...]) -> None:
    """The loop of the spawned process: ends when the pipe is closed."""
    served = None
    with contextlib.suppress(EOFError):
        while True:
            try:
                if served is None:
                    served, value = pkgutil.resolve_name(target)(*arguments), None
                else:
                    method, arguments = pipe.recv()
                    value = getattr(served, method)(*arguments)
            except EOFError:
                raise
            except Exception as error:
                if not isinstance(error, ConfigError | RunError):
                    traceback.print_exc()
                pipe.send((type(error).__name__, next(iter(str(error).splitlines()), "")))
            else:
                pipe.send((None, value))


def peak_bytes() -> int:
    """The most memory that this process has held so far.

    Linux counts what the parent held into `ru_maxrss`, but not into `VmHWM`.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
