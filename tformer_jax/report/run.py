"""Reads the files of a run folder; the run may have finished, be in progress, or have been killed."""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import resolved
from tformer_jax.config import Config
from tformer_jax.config.convert import flat_values
from tformer_jax.config.task import task_of_settings
from tformer_jax.report.outputs import Outputs
from tformer_jax.report.series import Series
from tformer_jax.runs import guards, run_folder
from tformer_jax.runs.run_folder import read_records
from tformer_jax.tasks.task import Task

ENDED = ("finished", "stopped", "failed")
"""Kinds of events with which a run ends, which are then its status."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder; fields of missing or damaged files are empty."""

    name: str
    """Unique among the runs of a report."""
    folder: Path
    config: dict[str, Any]
    """Every setting by its full name, such as `model.dim`."""
    provenance: dict[str, Any]
    corpus: dict[str, Any]
    """Facts that identify the corpus, as `experiment.corpus_facts` returns them."""
    model: dict[str, Any]
    data: dict[str, Any]
    """Statistics of the data, and warnings."""
    result: dict[str, Any]
    metrics: dict[str, Series]
    """Records by group: "train", "validation", "test"."""
    events: list[dict[str, Any]]
    outputs: dict[str, Outputs]
    """Outputs of the last evaluation of each split."""
    running: bool

    @property
    def status(self) -> str:
        """ "running", "finished", "stopped" (by a signal), "failed", or "ended early" (killed)."""
        if self.running:
            return "running"
        last = self.events[-1]["kind"] if self.events else ""
        return last if last in ENDED else "finished" if self.result else "ended early"

    def group(self, name: str) -> Series:
        """Returns the metrics of a group, which may be empty."""
        return self.metrics.get(name, Series.empty())

    @property
    def train(self) -> Series:
        """The training metrics."""
        return self.group("train")

    @property
    def nll_column(self) -> str:
        """Name of the training metric that is the loss without label smoothing."""
        return "nll" if "nll" in self.train.columns else "loss"

    @property
    def step(self) -> int:
        """The last step with a record or an event."""
        steps = [int(series.steps[-1]) for series in self.metrics.values() if len(series.steps)]
        return max([*steps, *(event["step"] for event in self.events)], default=0)

    @functools.cached_property
    def task(self) -> Task:
        """What the model is trained for."""
        return task_of_settings(self.config)

    @property
    def split(self) -> str | None:
        """The split whose outputs represent the run: "test", or else "validation"."""
        return next((split for split in ("test", "validation") if split in self.outputs), None)

    def is_current(self, split: str) -> bool:
        """Returns whether the outputs of a split belong to its last record: a resumed run keeps older outputs."""
        steps = self.group(split).steps
        return split in self.outputs and len(steps) > 0 and int(steps[-1]) == self.outputs[split].step

    def axis(self, name: str, steps: np.ndarray) -> np.ndarray:
        """Converts steps to "step", "tokens" or "seconds" by linear interpolation between the training records."""
        if name == "step":
            return steps.astype(np.float64)
        values = self.train.columns.get(name)
        if values is None:
            return np.full(len(steps), np.nan)
        return np.interp(steps, [0, *self.train.steps], [0, *values])


def load_all(folders: Sequence[Path], *, strict: bool = False) -> list[RunFiles]:
    """Reads several runs, named by the shortest ends of their paths that differ; damaged files are logged and left out.

    Raises:
        UserError: one of them is not a run folder, or is given twice; or a file is damaged, with `strict`.
    """
    paths = [resolved(folder) for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("the same run folder is given twice")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [load_run_files(path, name, strict=strict) for path, name in zip(paths, names, strict=True)]


def load_run_files(folder: Path, name: str, *, strict: bool) -> RunFiles:
    """Reads the files of a run folder; arguments and exceptions are as for `load_all`."""
    config = _json(folder / "config.json", strict=True)
    if not config:
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    read = functools.partial(_json, strict=strict)
    return RunFiles(
        name=name,
        folder=folder,
        config=flat_values(Config.defaults()) | {key: _setting(value) for key, value in flat_values(config).items()},
        provenance=read(folder / "provenance.json"),
        corpus=read(folder / run_folder.CORPUS),
        model=read(folder / "model.json"),
        data=read(folder / "data.json"),
        result=read(folder / "result.json"),
        metrics=_metrics(folder / "metrics.jsonl"),
        events=_events(run_folder.events(folder)),
        outputs={
            path.stem: Outputs.from_json(contents)
            for path in sorted((folder / "outputs").glob("*.json"))
            if (contents := read(path))
        },
        running=guards.is_locked(folder),
    )


def _setting(value: Any) -> Any:
    """Converts a list of JSON to the tuple that it was."""
    return tuple(map(_setting, value)) if isinstance(value, list) else value


def _json(path: Path, *, strict: bool) -> dict[str, Any]:
    """Returns the contents of a file; {} if it does not exist, or is damaged and not `strict`."""
    try:
        contents: dict[str, Any] = run_folder.read_json(path) if path.is_file() else {}
    except UserError as error:
        if strict:
            raise
        logging.getLogger(__name__).warning("%s; it is left out", error)
        return {}
    return contents


def _metrics(path: Path) -> dict[str, Series]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(path):
        groups.setdefault(record.pop("group", "train"), []).append(record)
    return {group: Series.from_records(records) for group, records in groups.items()}


def _events(path: Path) -> list[dict[str, Any]]:
    """Returns the events in order; of stages, spikes and skips that a resumed run repeats, only the last."""
    unique: dict[Any, dict[str, Any]] = {}
    for number, event in enumerate(read_records(path)):
        repeatable = event.get("kind") in ("stage", "spike", "skipped")
        name = "message" if event.get("kind") == "stage" else "step"
        key = (event["kind"], event[name]) if repeatable else number
        unique.pop(key, None)
        unique[key] = event
    return list(unique.values())


def differing_keys(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the keys whose values are not the same in all rows."""
    rows = list(rows)
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(row.get(key) != rows[0].get(key) for row in rows)]
