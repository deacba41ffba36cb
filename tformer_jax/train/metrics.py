"""Where metrics go: `metrics.jsonl`, one JSON object a line, and TensorBoard event files."""

import json
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class MetricsWriter:
    """Appends scalar metrics to a run folder.

    A resumed run drops the records made after the checkpoint it continues from, so that the file reads as if the
    run had never stopped.
    """

    def __init__(self, run: Path, *, resume_step: int = 0):
        path = run / "metrics.jsonl"
        kept = [line for line in _records(path) if line["step"] <= resume_step] if path.exists() else []
        _rewrite(path, kept)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=resume_step + 1 if kept else None)

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        """Records `values` of `group` ("train", "validation" or "test") at `step`."""
        self._file.write(json.dumps({"step": step, "group": group, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Flushes both writers."""
        self._file.close()
        self._board.close()


def _records(path: Path) -> list[dict[str, Any]]:
    """The complete records of a file whose last line may have been cut short."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    partial.replace(path)
