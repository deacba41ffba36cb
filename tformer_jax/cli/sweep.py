"""`scripts/sweep.py`: trains a config for each combination of settings, and compares the results."""

import argparse
import concurrent.futures
import itertools
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tformer_jax.cli.train import DATA_VARIABLE, check_writable, read_config
from tformer_jax.config import LOWER_IS_BETTER, Config, ConfigError, to_dict
from tformer_jax.train.errors import RunError
from tformer_jax.train.run_folder import write_json

TRAIN = "from tformer_jax.cli.common import run_main; from tformer_jax.cli.train import main; run_main(main)"
Combination = tuple[str, ...]
"""`NAME=VALUE` for each setting of the sweep."""


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the runs that are not finished, and prints a table of all runs.

    Raises:
        ConfigError: the sweep or one of its configs is invalid; no run is started.
        RunError: some runs failed.
    """
    options, overrides = parser().parse_known_args(argv)
    combinations = expand(options.sweep)
    if options.record:
        check_writable(options.record)
    configs = [read_config(options.config, [*overrides, *as_flags(found)]) for found in combinations]
    folder = options.output or Path("runs") / f"{read_config(options.config, overrides).name}_sweep"
    check_same_sweep(folder, configs, combinations)
    slots: queue.Queue[str | None] = queue.Queue()
    for device in options.devices.split(",") if options.devices else [None]:
        slots.put(device)
    with concurrent.futures.ThreadPoolExecutor(slots.qsize()) as pool:
        jobs = [
            pool.submit(train, options, overrides, found, folder / run_name(found), slots) for found in combinations
        ]
        failed = [problem for job in jobs if (problem := job.result())]
    results = {found: result for found in combinations if (result := read_result(folder / run_name(found)))}
    write_json(folder / "results.json", [{"settings": found, **result} for found, result in results.items()])
    Console().print(table(results, configs[0]))
    if failed:
        raise RunError(f"{len(failed)} of {len(combinations)} runs failed; the first: {failed[0]}")
    if options.record:
        write_json(options.record, summary(results, configs[0]))


def parser() -> argparse.ArgumentParser:
    """Returns the parser; settings of the config are separate: `--config.SECTION.SETTING=VALUE`."""
    result = argparse.ArgumentParser(
        prog="sweep.py",
        description="Trains a config for each combination of settings. The same command resumes an interrupted sweep.",
        allow_abbrev=False,
    )
    result.add_argument("--config", required=True, metavar="FILE[:VARIANT]")
    result.add_argument(
        "--sweep", required=True, metavar="SETTINGS", help='such as "optim.learning_rate=1e-3,3e-3; seed=0,1,2"'
    )
    result.add_argument("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/NAME_sweep)")
    result.add_argument("--devices", metavar="LIST", help="GPUs, such as 0,1, each of which trains one run at a time")
    result.add_argument("--record", type=Path, metavar="FILE", help="also write all results to this JSON file")
    result.add_argument("--data", type=Path, metavar="DIR", default=os.environ.get(DATA_VARIABLE))
    return result


def expand(text: str) -> list[Combination]:
    """Returns all combinations of `NAME=VALUE,VALUE; NAME=VALUE`, where the last name varies fastest.

    Raises:
        ConfigError: the text has another format.
    """
    settings = []
    for part in filter(None, map(str.strip, text.split(";"))):
        name, equals, values = part.partition("=")
        choices = _split(values)
        if not (name.strip() and equals and all(choices)):
            raise ConfigError(f'--sweep: {part!r} must read NAME=VALUE,VALUE; for example "seed=0,1; model.dim=64,128"')
        settings.append([f"{name.strip()}={value}" for value in choices])
    if not settings:
        raise ConfigError('--sweep is empty; write for example "optim.learning_rate=1e-3,3e-3; seed=0,1"')
    return list(itertools.product(*settings))


def run_name(combination: Combination) -> str:
    """Returns the name of a combination's run folder: its settings, with "%" and "/" percent-encoded."""
    return ",".join(combination).replace("%", "%25").replace("/", "%2F")


def as_flags(combination: Combination) -> list[str]:
    """Returns the command-line flags of a combination."""
    return [f"--config.{setting}" for setting in combination]


def check_same_sweep(folder: Path, configs: Sequence[Config], combinations: Sequence[Combination]) -> None:
    """Creates the folder of a sweep, or checks that its runs have the same configs.

    Raises:
        ConfigError: it holds runs of other configs, or cannot be written.
    """
    path = folder / "sweep.json"
    wanted = {run_name(found): to_dict(cfg) for found, cfg in zip(combinations, configs, strict=True)}
    wanted = json.loads(json.dumps(wanted))
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(known[name] != values for name, values in wanted.items() if name in known):
        raise ConfigError(f"{folder} is a sweep of another config; name another folder with --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, **wanted})
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}); name another with --output") from error


def train(
    options: argparse.Namespace, overrides: Sequence[str], found: Combination, run: Path, slots: queue.Queue
) -> str | None:
    """Trains one combination on a free device; returns the error, or None."""
    if read_result(run):
        return None
    device = slots.get()
    try:
        print(f"{run}: training" + (f" on device {device}" if device is not None else ""), flush=True)
        command = [sys.executable, "-c", TRAIN, f"--config={options.config}", *overrides, *as_flags(found)]
        command += [f"--run={run}", "--resume"]
        data = {DATA_VARIABLE: str(options.data)} if options.data else {}
        environment = {**os.environ, **data} | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        log = run.with_name(f"{run.name}.log")
        with log.open("a", encoding="utf-8") as output:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
        if status.returncode == 0:
            return None
        last = (log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"])[-1]
        print(f"{run}: failed: {last}", flush=True)
        return f"{run}: {last} (full log: {log})"
    finally:
        slots.put(device)


def read_result(run: Path) -> dict[str, Any] | None:
    """Returns the result of a finished run; None for other runs."""
    path = run / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(results: dict[Combination, dict[str, Any]], cfg: Config) -> Table:
    """Returns a table of the test metrics of each run, best first; with several seeds, also means and deviations."""
    metric = cfg.train.metric
    ordered = sorted(results.items(), key=lambda item: item[1]["test"][metric], reverse=metric not in LOWER_IS_BETTER)
    names = list(ordered[0][1]["test"]) if ordered else []
    view = Table(title=f"{len(ordered)} runs, best {metric} first")
    for heading in ("settings", *names):
        view.add_column(heading)
    for found, result in ordered:
        view.add_row("  ".join(found), *(f"{result['test'][name]:.4g}" for name in names))
    groups = by_seeds(results)
    if len(groups) < len(ordered):
        view.add_section()
        for found, tests in groups.items():
            cells = [f"{mean:.4g} ± {deviation:.2g}" for mean, deviation in map(spread, tests.values())]
            view.add_row("  ".join([*found, f"{len(tests[names[0]])} seeds"]), *cells)
    return view


def by_seeds(results: dict[Combination, dict[str, Any]]) -> dict[Combination, dict[str, list[float]]]:
    """Returns the values of each test metric over the seeds, by the other settings."""
    groups: dict[Combination, dict[str, list[float]]] = {}
    for found, result in results.items():
        group = groups.setdefault(tuple(part for part in found if not part.startswith("seed=")), {})
        for name, value in result["test"].items():
            group.setdefault(name, []).append(value)
    return groups


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the standard deviation of the sample (0 of one value)."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def summary(results: dict[Combination, dict[str, Any]], cfg: Config) -> dict[str, Any]:
    """Returns all results of a sweep, with the mean and the standard deviation of each metric over the seeds."""
    groups = [
        {
            "settings": found,
            "seeds": len(next(iter(tests.values()))),
            **{
                part: {name: spread(values)[index] for name, values in tests.items()}
                for index, part in enumerate(("mean", "deviation"))
            },
        }
        for found, tests in by_seeds(results).items()
    ]
    runs = [
        {"settings": found, **{name: value for name, value in result.items() if name != "command"}}
        for found, result in results.items()
    ]
    return {"name": cfg.name, "command": shlex.join(["python", *sys.argv]), "groups": groups, "runs": runs}


def _split(values: str) -> list[str]:
    """Splits at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
