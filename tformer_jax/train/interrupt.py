"""Ctrl-C and SIGTERM end a run at the next step, with a checkpoint; a second Ctrl-C ends it at once."""

import signal
from types import FrameType


class GracefulStop:
    """While entered, the first SIGINT or SIGTERM sets `requested` and restores the previous handlers."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "GracefulStop":
        self._previous = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
