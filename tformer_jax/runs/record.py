"""What a run writes and shows while it trains: metrics, events, outputs and lines on the terminal."""

from collections.abc import Mapping
from typing import Any

from tformer_jax.runs import run_folder
from tformer_jax.runs.events import EventLog
from tformer_jax.runs.experiment import Experiment
from tformer_jax.runs.metrics import MetricsWriter
from tformer_jax.runs.progress import ProgressView
from tformer_jax.tasks.evaluators.evaluation import Evaluation


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
