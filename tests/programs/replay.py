"""Trains the first steps of recorded results again: the tokens must be equal, and the losses nearly so.

python -m tests.programs.replay --data DIR --record tests/programs/replay.json configs/results/*.json

A result with learning curves names its command and seeds. Its first run is started again and stopped after `--steps`
steps, at a fraction of the time of the whole. Equal numbers of tokens mean that texts, tokenizers, lengths and order of
the batches are as they were; losses differ by rounding on another processor, and with other versions of the libraries.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import commands
from tformer_jax.runs.run_folder import read_records

TOLERANCE = 0.002
"""Maximum relative difference of a loss."""
Curve = Mapping[str, Sequence[float]]
"""Values by metric, of equal lengths."""


class CannotReplay(Exception):
    """A record without a curve of its first steps, or a run that did not start."""


def main() -> None:
    """Replays the results, records and prints what differs; exits with 1 if something does."""
    options = parser().parse_args()
    results = {}
    for path in options.results:
        results[path.name] = replay(path, options.data, options.steps)
        print(path.name, results[path.name], flush=True)
        if options.record:
            commands.write_record(options.record, "tests.programs.replay", tolerance=TOLERANCE, results=results)
    sys.exit(any(result.get("equal") is False for result in results.values()))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    summary, _, description = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=f"{summary}\n{description}")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", type=Path)
    return parser


def replay(path: Path, data: str, steps: int) -> dict[str, Any]:
    """Returns the recorded and the actual curve of a result's first run, and whether they agree; or why not."""
    result = json.loads(path.read_text(encoding="utf-8"))
    try:
        recorded = first_steps(result, steps)
        actual = train(train_flags(result), data, int(recorded["step"][-1]))
        return compare(recorded, actual)
    except CannotReplay as error:
        return {"not_replayed": str(error)}


def first_steps(result: Mapping[str, Any], steps: int) -> Curve:
    """Returns the recorded curve of the first run up to `steps`, or its first point."""
    curve = (result.get("runs") or [{}])[0].get("curves", {}).get("train")
    if not curve:
        raise CannotReplay("the record has no curve")
    length = max(1, sum(step <= steps for step in curve["step"]))
    return {name: curve[name][:length] for name in ("step", "tokens", "loss")}


def train_flags(result: Mapping[str, Any]) -> list[str]:
    """Returns the flags of `scripts/train.py` for the first run of a recorded sweep."""
    words = shlex.split(result["command"])
    config = words[words.index("--config") + 1]
    overrides = [word for word in words if word.startswith("--config.")]
    return ["--config", config, *overrides, *(f"--config.{setting}" for setting in result["runs"][0]["settings"])]


def train(flags: Sequence[str], data: str, steps: int) -> Curve:
    """Trains until the metrics of `steps` are recorded, and returns the curve."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        run = Path(folder) / "run"
        command = [sys.executable, "scripts/train.py", *flags, "--data", data, "--run", str(run)]
        process = subprocess.Popen(command, cwd=commands.ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                records = training_records(run)
                if records and records[-1]["step"] >= steps:
                    return {name: [record[name] for record in records] for name in ("step", "tokens", "loss")}
                time.sleep(1)
        finally:
            process.terminate()
            process.wait()
        errors.seek(0)
        raise CannotReplay((errors.read().strip().splitlines() or ["the run ended early"])[-1])


def training_records(run: Path) -> list[dict[str, Any]]:
    """Returns the records of training so far."""
    path = run / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    return [record for record in records if record.get("group") == "train"]


def compare(recorded: Curve, actual: Curve) -> dict[str, Any]:
    """Returns the two curves at the recorded steps, and whether they agree."""
    rows = [actual["step"].index(step) for step in recorded["step"]]
    mine = {name: [values[row] for row in rows] for name, values in actual.items()}
    largest = max(abs(loss / other - 1) for loss, other in zip(mine["loss"], recorded["loss"], strict=True))
    equal = list(mine["tokens"]) == list(recorded["tokens"]) and largest <= TOLERANCE
    return {"equal": equal, "largest_difference_of_loss": largest, "recorded": dict(recorded), "actual": mine}


if __name__ == "__main__":
    main()
