"""Objects in separate processes, to isolate their memory and threads."""

import contextlib
import multiprocessing
import pkgutil
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tformer_jax.base.errors import RunError, UserError

_served: Any = None
"""The object, in its process."""


class Remote(contextlib.AbstractContextManager["Remote"]):
    """Proxy of an object in a spawned process; calls its methods synchronously.

    The process imports only the module of the object, and is idle between calls.
    """

    def __init__(self, target: str, *arguments: Any):
        """Constructs `target` in the process; `self.seconds` is the time that takes.

        Args:
            target: the class, written `module:attribute`.

        Raises:
            UserError: `target` raises it.
            RunError: `target` raises another exception, or the process is killed.
        """
        self._target = target
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        start = time.perf_counter()
        self.call("", *arguments)
        self.seconds = time.perf_counter() - start

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the object and returns its result. Raises like `__init__`."""
        try:
            error, value = self._pool.submit(_serve, self._target, method, arguments).result()
        except BrokenProcessPool as end:
            raise RunError(f"the process of {self._target} was killed, probably because memory ran out") from end
        if error is None:
            return value
        raise UserError(value) if error == UserError.__name__ else RunError(f"{self._target}: {error}: {value}")


def _serve(target: str, method: str, arguments: tuple[Any, ...]) -> tuple[str | None, Any]:
    """Calls a method, or without one constructs the object; returns the type of an exception and its first line."""
    global _served
    try:
        if method:
            return None, getattr(_served, method)(*arguments)
        _served = pkgutil.resolve_name(target)(*arguments)
        return None, None
    except Exception as error:
        if not isinstance(error, UserError | RunError):
            traceback.print_exc()
        return type(error).__name__, next(iter(str(error).splitlines()), "")
