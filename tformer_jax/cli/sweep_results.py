"""The results of the runs of a sweep."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import RunError, UserError
from tformer_jax.config import Config, DataConfig
from tformer_jax.report.sweeps import Combination
from tformer_jax.runs import curves
from tformer_jax.runs.run_folder import CORPUS, read_json, read_records, read_result, write_json

RESULTS = "results.json"
"""Name of the file of all results, in the folder of the sweep."""


def run_name(combination: Combination) -> str:
    """Returns the name of a combination's run folder: its settings, with "%" and "/" percent-encoded."""
    return ",".join(combination).replace("%", "%25").replace("/", "%2F")


def read_results(folder: Path, combinations: Sequence[Combination]) -> dict[Combination, dict[str, Any]]:
    """Returns the results of the finished runs, each with its curves, and `validation_and_speed` where it lacks them.

    A result has validation metrics of its own if its weights are from another step than the last one.
    """
    results: dict[Combination, dict[str, Any]] = {}
    for combination in combinations:
        run = folder / run_name(combination)
        if (run / "result.json").exists():
            result = read_result(run)
            measured = validation_and_speed(run / "metrics.jsonl")
            results[combination] = measured | result | {"curves": curves.summarize_curves(run)}
            if "tokens_per_second" not in results[combination]:
                results[combination]["tokens_per_second"] = result["tokens"] / result["seconds"]
    return results


def check_same_data(folder: Path, configs: Mapping[Combination, Config]) -> None:
    """Checks that finished runs had the same held-out examples, and with equal `data` the same training examples.

    Raises:
        UserError: two runs had different examples.
    """
    first_runs: dict[tuple[str, DataConfig | None], tuple[Path, Any]] = {}
    for combination, cfg in configs.items():
        run = folder / run_name(combination)
        if cfg.data.generated or not ((run / "result.json").exists() and (run / CORPUS).exists()):
            continue
        for name, value in read_json(run / CORPUS).items():
            other, before = first_runs.setdefault((name, cfg.data if "train" in name else None), (run, value))
            if before != value:
                raise UserError(
                    f"{other} and {run} had different data: {name} is {before} and {value}; remove the run of other "
                    "data, and the same command trains it again"
                )


def write_results(path: Path, results: Mapping[Combination, Mapping[str, Any]]) -> None:
    """Writes the results, and keeps the file's results of other combinations."""
    recorded = read_json(path, list) if path.exists() else []
    others = [result for result in recorded if tuple(result["settings"]) not in results]
    write_json(path, [*others, *({"settings": combination, **result} for combination, result in results.items())])


def validation_and_speed(path: Path) -> dict[str, Any]:
    """Returns a run's last validation metrics (None for non-finite ones) and its median training speed in tokens/s.

    The speed is missing if the run ended before its first record.

    Raises:
        RunError: the run has no validation metrics.
    """
    records = read_records(path)
    speeds = [record["tokens_per_second"] for record in records if record.get("group") == "train"]
    evaluations = [record for record in records if record.get("group") == "validation"]
    if not evaluations:
        raise RunError(f"{path} has no validation metrics: remove {path.parent}, and the sweep trains this run again")
    validation = {name: value for name, value in evaluations[-1].items() if name not in ("step", "group")}
    return {"validation": validation} | ({"tokens_per_second": statistics.median(speeds)} if speeds else {})
