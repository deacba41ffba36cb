"""How a run ends early: by a signal, which it survives with a checkpoint, or by a computation that fails."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax

from tformer_jax.base.errors import FULL_DISK, LESS_MEMORY, RunError, first_line, out_of_memory
from tformer_jax.parallel.multihost import ProcessGroup

ADVICE = b"\nStopping after this step, with a checkpoint; press Ctrl-C again to stop without one.\n"


class GracefulStop:
    """Context in which the first SIGINT or SIGTERM sets `requested`, says so and restores the previous handlers.

    In another thread than the main one, which alone has handlers, it does nothing. A signal that this process was
    started to ignore, as a background command of a shell script ignores SIGINT, stays ignored.

    With `several` processes, JAX handles SIGTERM (`multihost_utils.reached_preemption_sync_point`), and SIGINT is
    re-raised as SIGTERM.
    """

    def __init__(self, *, several: bool = False) -> None:
        self.requested = False
        self._several = several
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "GracefulStop":
        signals = [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]
        if threading.current_thread() is not threading.main_thread():
            signals = []
        signals = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._request) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        if number == signal.SIGINT:
            os.write(2, ADVICE)
        if self._several:
            signal.raise_signal(signal.SIGTERM)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


LOST_WORKER = "Worker process was terminated unexpectedly"
"""How Grain's error begins if a process of the loader was killed."""


@contextlib.contextmanager
def as_run_errors(group: ProcessGroup) -> Iterator[None]:
    """Turns a failure that the user can resolve into a `RunError` that explains it.

    These are a lack of memory, a full disk, a lost loader process and a failed collective. (`jax.distributed` ends all
    processes after the error of one.)
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise RunError(
            f"{error.filename or 'a file of the run'} cannot be written ({error.strerror}): free some space, then the "
            "same command with --resume continues from the last checkpoint"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        if reason := out_of_memory(error):
            raise RunError(
                f"the run does not fit in memory ({reason}): use --resume with more devices, {LESS_MEMORY}, or a "
                "smaller eval.batch_size if it failed in an evaluation; or start again with smaller batches "
                "(data.batch_tokens or data.batch_size) or train.accumulate"
            ) from error
        if group.count == 1:
            raise
        reason = first_line(error)
        raise RunError(
            f"a computation of {group.count} processes failed in process {group.index} ({reason}); if another process "
            "was lost, the same commands with --resume continue from the last checkpoint"
        ) from error
    except RuntimeError as error:
        if not str(error).startswith(LOST_WORKER):
            raise
        reason = str(error).partition(".")[0]
        raise RunError(
            f"the data loader failed ({reason}), often for lack of memory: free some; the same command with --resume "
            "continues from the last checkpoint (a new run may set fewer data.workers)"
        ) from error
