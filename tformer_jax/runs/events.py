"""Events of a run, such as starts, interruptions and loss spikes, one JSON object per line of `events.jsonl`."""

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tformer_jax.base.errors import first_line
from tformer_jax.base.paths import append_lines


def path(run: Path) -> Path:
    """Returns the path of the events of a run."""
    return run / "events.jsonl"


class EventLog:
    """Appends to the events of a run. A resumed run keeps all earlier events, unlike its metrics."""

    def __init__(self, run: Path, *, recording: bool = True):
        """With `recording=False`, nothing is written."""
        self._path, self._recording = path(run), recording

    def write(self, step: int, kind: str, message: str = "") -> None:
        """Appends an event.

        It is dropped if the disk is full or not writable, which the metrics report.

        Args:
            step: last step that was done.
            kind: "start", "resume", "settings" (changed by a resume), "stage", "spike", "skipped", "stopped", "failed",
                "fewer_averaged" (checkpoints than `train.average`) or "finished".
            message: one line for people.
        """
        if not self._recording:
            return
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        event = {"time": time, "step": step, "kind": kind, "message": message}
        with contextlib.suppress(OSError):
            append_lines(self._path, json.dumps(event, ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def failure_recorded(self, step: Callable[[], int]) -> Iterator[None]:
        """Appends the error that ends the block; `step` returns the last step that was done."""
        try:
            yield
        except Exception as error:
            self.write(step(), "failed", first_line(error))
            raise
