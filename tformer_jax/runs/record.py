"""What a run writes and shows while it trains: metrics, events, outputs and lines on the terminal."""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import first_line
from tformer_jax.base.paths import append_lines
from tformer_jax.config import Config
from tformer_jax.config.fields import OTHER_TRAINING
from tformer_jax.runs import provenance, run_folder
from tformer_jax.runs.experiment import Experiment
from tformer_jax.runs.metrics import MetricsWriter
from tformer_jax.runs.progress import ProgressView
from tformer_jax.tasks.evaluators.evaluation import Evaluation

DRAWING = ("model.attention_backend", "parallel.sequence")
"""Settings without effect on training but for the random numbers of attention dropout."""


class EventLog:
    """Appends to the events of a run. A resumed run keeps all earlier events, unlike its metrics."""

    def __init__(self, run: Path, *, recording: bool = True):
        """With `recording=False`, nothing is written."""
        self._path, self._recording = run_folder.events(run), recording

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
            self.write(step(), "failed", first_line(error, longest=None))
            raise


@dataclasses.dataclass(frozen=True)
class SettingChanges:
    """The settings that a resume changes, after the changes that the checkpoint records."""

    from_step: int
    """Step of the checkpoint that the run continues from."""
    texts: list[str]
    """The changes of this resume, as `optim.clip_norm: 1.0 -> 0.5`."""
    earlier: list[dict[str, Any]]
    attention_dropout: bool = False
    """Whether attention weights are dropped, by random numbers that depend on `DRAWING`."""

    def of_training(self, step: int) -> list[dict[str, Any]]:
        """Returns the changes that affected the training of the steps up to `step`, with the step where each began."""
        new = [
            {"from_step": self.from_step, "setting": text}
            for text in self.texts
            if self._affects_training(text.partition(":")[0])
        ]
        return [*self.earlier, *(new if step > self.from_step else [])]

    def _affects_training(self, name: str) -> bool:
        if name in DRAWING:
            return self.attention_dropout
        return name == provenance.MATMUL_PRECISION or Config.resume_effect(name) == OTHER_TRAINING


class Record:
    """The files and the terminal of a run; only process 0 writes and shows anything."""

    def __init__(self, experiment: Experiment, view: ProgressView, resume_step: int):
        first, folder = experiment.group.first, experiment.folder
        self.folder, self.view, self._writes = folder, view, first
        self.metrics = MetricsWriter(folder, experiment.cfg, resume_step=resume_step, recording=first)
        self.events = EventLog(folder, recording=first)

    def report_event(self, step: int, kind: str, message: str) -> None:
        """Shows a message after its step, and records it."""
        self.view.say(f"step {step}: {message}")
        self.events.write(step, kind, message)

    def announce_event(self, step: int, kind: str, message: str) -> None:
        """Shows a message without its step, and records it with its step."""
        self.view.say(message)
        self.events.write(step, kind, message)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file of the run folder."""
        if self._writes:
            run_folder.write_json(self.folder / name, value)

    def write_evaluation(
        self, step: int, split: str, title: str, evaluation: Evaluation, signatures: Mapping[str, str]
    ) -> None:
        """Records an evaluation of a split, whose name for people is `title`, with its outputs and losses."""
        self.metrics.write(step, split, evaluation.metrics)
        if self._writes:
            outputs = [output.to_record() for output in evaluation.outputs]
            record = {"step": step, "split": title, "signatures": signatures, "outputs": outputs}
            record |= {"remarks": evaluation.remarks}
            record |= {"losses": vars(evaluation.losses)} if evaluation.losses else {}
            run_folder.write_outputs(self.folder, split, record)

    def close(self) -> None:
        """Closes the files of metrics."""
        self.metrics.close()
