"""Ctrl-C or SIGTERM stops a run after the current step, with a checkpoint; a second one stops it immediately."""

import os
import signal
from types import FrameType

ADVICE = b"\nStopping after this step, with a checkpoint; press Ctrl-C again to stop without one.\n"


class GracefulStop:
    """Context in which the first SIGINT or SIGTERM sets `requested`, says so and restores the previous handlers.

    With `several` processes, JAX handles SIGTERM (`multihost_utils.reached_preemption_sync_point`), and SIGINT is
    re-raised as SIGTERM.
    """

    def __init__(self, *, several: bool = False) -> None:
        self.requested = False
        self._several = several
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "GracefulStop":
        signals = [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]
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
