"""Objects in separate processes, to isolate their memory and threads."""

import contextlib
import multiprocessing
import pkgutil
import time
import traceback
from typing import Any

from tformer_jax.base.errors import RunError, UserError


class Remote:
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
        """Calls a method of the object and returns its result. Raises like `__init__`."""
        self._pipe.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            error, value = self._pipe.recv()
        except EOFError as end:
            raise RunError(f"the process of {self._target} was killed, probably because memory ran out") from end
        if error is None:
            return value
        raise UserError(value) if error == UserError.__name__ else RunError(f"{self._target}: {error}: {value}")


def _serve(pipe: Any, target: str, arguments: tuple[Any, ...]) -> None:
    """Serves calls in the spawned process until the pipe is closed."""
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
                if not isinstance(error, UserError | RunError):
                    traceback.print_exc()
                pipe.send((type(error).__name__, next(iter(str(error).splitlines()), "")))
            else:
                pipe.send((None, value))
