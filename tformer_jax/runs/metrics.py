"""Writes metrics to `metrics.jsonl` (one JSON object per line), TensorBoard and, optionally, Weights & Biases."""

import contextlib
import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tformer_jax.base import checks
from tformer_jax.base.errors import RunError
from tformer_jax.base.paths import append_lines, finite, is_remote, write_text
from tformer_jax.base.workarounds import import_prevented, silence_tensorboard
from tformer_jax.config import Config, to_dict
from tformer_jax.runs import run_folder

FLUSH_SECONDS = 60
"""Minimum interval, between checkpoints, of writes to a bucket, which write entire objects, and of TensorBoard's."""


class MetricsWriter:
    """Writes scalar metrics to every sink: a destination with the methods `write`, `flush` and `close`.

    When a run is resumed, records after its checkpoint and records of an earlier test are dropped, as if the run had
    never stopped.
    """

    def __init__(self, run: Path, cfg: Config, *, resume_step: int = 0, recording: bool = True):
        """Opens the sinks; with `recording=False` there are none."""
        self._run = run
        self._sinks: list[JsonLines | TensorBoard | WeightsAndBiases] = []
        if not recording:
            return
        with self._as_run_errors():
            self._sinks = [JsonLines(run, resume_step), TensorBoard(run, resume_step)]
        if cfg.train.wandb:
            self._sinks.append(WeightsAndBiases(run, cfg, cfg.train.wandb))

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        """Records `values` of `group` ("train", "validation" or "test") at `step`.

        Raises:
            RunError: they cannot be written.
        """
        with self._as_run_errors():
            for sink in self._sinks:
                sink.write(step, group, values)

    def flush(self) -> None:
        """Writes the records that wait in memory, since a run resumed from the next checkpoint does not repeat them.

        Raises:
            RunError: they cannot be written.
        """
        with self._as_run_errors():
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            with self._as_run_errors():
                sink.close()

    @contextlib.contextmanager
    def _as_run_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"metrics cannot be written to {self._run} ({error.strerror or error}): free some space or restore the "
                "write permission, then the same command with --resume continues from the last checkpoint"
            ) from error


class JsonLines:
    """Writes `metrics.jsonl`; non-finite numbers become null."""

    def __init__(self, run: Path, resume_step: int):
        self._path, self._waiting, self._written = run / "metrics.jsonl", "", time.monotonic()
        records = run_folder.read_records(self._path)
        earlier = [record for record in records if record["step"] <= resume_step and record.get("group") != "test"]
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in earlier))

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        self._waiting += json.dumps(finite({"step": step, "group": group, **values})) + "\n"
        if not is_remote(self._path) or time.monotonic() - self._written >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            append_lines(self._path, self._waiting)
            self._waiting, self._written = "", time.monotonic()

    def close(self) -> None:
        self.flush()


class TensorBoard:
    """Writes TensorBoard event files, one per start of the run, in the calling thread.

    `SummaryWriter` of tensorboardX 2.6 writes in another thread, which a full disk ends; later calls then block.
    """

    def __init__(self, run: Path, resume_step: int):
        self._folder, self._first_step, self._flushed = run / "tensorboard", resume_step + 1, -math.inf

    @functools.cached_property
    def _library(self) -> Any:
        silence_tensorboard()
        with import_prevented("torch"):
            import tensorboardX

        return tensorboardX

    @functools.cached_property
    def _writer(self) -> Any:
        """Created at the first record; TensorBoard drops earlier events from the step of the start on."""
        self._library.record_writer.directory_check(str(self._folder))
        writer, events = self._library.event_file_writer.EventsWriter(f"{self._folder}/events"), self._events
        start = events.SessionLog(status=events.SessionLog.START)
        writer.write_event(events.Event(wall_time=time.time(), step=self._first_step, session_log=start))
        return writer

    @property
    def _events(self) -> Any:
        return self._library.proto.event_pb2

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            summary = self._library.summary.scalar(f"{group}/{name}", value)
            self._writer.write_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes to a Weights & Biases run, which a resumed run continues."""

    def __init__(self, run: Path, cfg: Config, project: str):
        import wandb

        identity = run_folder.run_id(run)
        folder = None if is_remote(run) else str(run)
        self._run = wandb.init(
            project=project, name=cfg.name, id=identity, resume="allow", dir=folder, config=to_dict(cfg)
        )

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        self._run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

    def flush(self) -> None:
        """Does nothing: a process of the package uploads the records as they come."""

    def close(self) -> None:
        self._run.finish()


def check_installed(cfg: Config) -> None:
    """Raises `UserError` if the package of a requested sink is not installed."""
    if cfg.train.wandb:
        checks.require("train.wandb", ("wandb",), "wandb")
