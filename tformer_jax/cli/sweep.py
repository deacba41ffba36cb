"""`scripts/sweep.py`: trains a config for each combination of settings, and compares the results."""

import argparse
import concurrent.futures
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from tformer_jax.base.errors import RunError, UserError
from tformer_jax.base.numbers import counted
from tformer_jax.base.paths import resolved
from tformer_jax.cli.children import Children
from tformer_jax.cli.common import DATA_VARIABLE, add_data, add_number, add_path, check_writable, new_parser
from tformer_jax.cli.config_file import read_config
from tformer_jax.cli.sweep_results import RESULTS, check_same_data, read_results, run_name, write_results
from tformer_jax.cli.tables import make_table, table_console
from tformer_jax.config import Config, comparable, differences, flat, to_dict
from tformer_jax.config.metrics import group_of_metric
from tformer_jax.report import sweep_plot, sweeps
from tformer_jax.report.sweeps import Combination
from tformer_jax.runs import provenance
from tformer_jax.runs.console import RunConsole
from tformer_jax.runs.run_folder import read_json, write_json

TRAIN = "from tformer_jax.cli.common import run_main; from tformer_jax.cli.train import main; run_main(main)"
SHARED_DEVICE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of runs that share a device: by default, JAX reserves three quarters of a GPU's memory when it starts."""
ADVICE = re.compile("(?:;|,) (?:then )?(?:repeat the|the same) command with --resume")
"""Begin of the advice of `train.py` to resume a run, which a sweep does by itself."""
OTHER_FOLDER = ", or choose another run folder"
"""End of the advice of `train.py` on a run in use; the folders of a sweep are given."""
CONFIGS = "sweep.json"
"""Name of the file of all configs, in the folder of the sweep."""
MAX_NAME_BYTES = 240
"""Bytes of a folder's name; file systems allow 255, and suffixes and temporary names need some."""


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the runs that are not finished, and prints a table of the results."""
    options, overrides = parser().parse_known_args(argv)
    combinations = expand_settings(options.sweep)
    check_options(options, combinations)
    check_settings(overrides, combinations)
    configs = [
        read_config(config_location(options.config, combination), [*overrides, *setting_flags(combination)])
        for combination in combinations
    ]
    name, metric = sweep_name(options.config, overrides, combinations), configs[0].train.metric
    folder = options.output or Path("runs") / f"{name}_sweep"
    check_files(options, folder)
    check_comparable(configs, combinations)
    check_same_sweep(folder, configs, combinations)
    failed, best = [], None
    if options.choose:
        first_seed = {part for part in combinations[0] if part.startswith("seed=")}  # empty without seeds
        trials = [combination for combination in combinations if first_seed <= {*combination}]
        failed = train_all(options, overrides, trials, folder)
        best = sweeps.chosen_combinations(read_results(folder, trials), options.choose, metric)
    todo = [each for each in combinations if best is None or sweeps.without_setting(each, "seed") in best]
    failed += train_all(options, overrides, todo, folder)
    results = read_results(folder, combinations)
    write_results(folder / RESULTS, results)
    check_same_data(folder, dict(zip(combinations, configs, strict=True)))
    if results and best != set():
        facts = {"name": name, "command": provenance.command(), "metric": metric, "chosen": options.choose}
        print_results(options, facts | sweeps.make_record(results, metric, only=best) | {"failed": failed})
    if failed:
        raise RunError(f"{len(failed)} of {counted(len(combinations), 'run')} failed; the first: {failed[0]}")


def sweep_name(config: str, overrides: Sequence[str], combinations: Sequence[Combination]) -> str:
    """Returns the name of the config, or its file and variant if `combinations` have variants."""
    named = any(override.startswith("--config.name=") for override in overrides)
    if named or not any(setting.startswith("variant=") for setting in combinations[0]):
        return read_config(config, overrides).name
    path, _, variant = config.partition(":")
    return re.sub(r"\W+", "_", f"{Path(path).stem}_{variant}").strip("_")


def parser() -> argparse.ArgumentParser:
    """Returns the parser; settings of the config are separate: `--config.SECTION.SETTING=VALUE`."""
    result = new_parser(
        "sweep", "Trains a config for each combination of settings. The same command resumes an interrupted sweep."
    )
    result.add_argument("--config", required=True, metavar="FILE[:VARIANT]")
    result.add_argument(
        "--sweep",
        required=True,
        metavar="SETTINGS",
        help='such as "optim.learning_rate=1e-3,3e-3; seed=0,1,2"; the values of variant are appended to --config '
        "after a colon",
    )
    result.add_argument(
        "--choose",
        metavar="SETTING",
        help="keep only the value of this setting that is best on the validation split with the first seed, for each "
        "combination of the others; the other seeds train only with it",
    )
    add_path(result, "--output", "folder of the runs (default: runs/NAME_sweep)", unit="DIR")
    result.add_argument("--devices", metavar="LIST", help="GPUs to use, such as 0,1")
    add_number(result, "--jobs", "runs at a time on each device", 1)
    add_path(result, "--record", "also write all results to this JSON file")
    add_path(result, "--plot", "also plot the metric (.svg, .png or .pdf)")
    add_data(result)
    return result


def expand_settings(text: str) -> list[Combination]:
    """Returns all combinations of `NAME=VALUE,VALUE; NAME=VALUE`, where the last name varies fastest.

    Raises:
        UserError: the text has another format.
    """
    settings: list[list[str]] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        name, equals, values = part.partition("=")
        choices = _split_values(values)
        if not (name.strip() and equals and all(choices)):
            raise UserError(f'--sweep: {part!r} must read NAME=VALUE,VALUE; for example "seed=0,1; model.dim=64,128"')
        if any(written.startswith(f"{name.strip()}=") for written, *_ in settings if name.strip() != "variant"):
            raise UserError(f"--sweep: {name.strip()} is written twice; write all its values after one NAME=")
        settings.append([f"{name.strip()}={value}" for value in choices])
    if not settings:
        raise UserError('--sweep is empty; write for example "optim.learning_rate=1e-3,3e-3; seed=0,1"')
    return list(itertools.product(*settings))


def config_location(config: str, combination: Combination) -> str:
    """Returns the config of a combination: `config`, and each `variant` of the combination after a colon."""
    return ":".join([config, *(part.removeprefix("variant=") for part in combination if part.startswith("variant="))])


def setting_flags(combination: Combination) -> list[str]:
    """Returns the command-line flags of a combination."""
    return [f"--config.{setting}" for setting in sweeps.without_setting(combination, "variant")]


def check_options(options: argparse.Namespace, combinations: Sequence[Combination]) -> None:
    """Checks the flags before anything is trained.

    Raises:
        UserError: a name is invalid or too long.
    """
    names = [part.partition("=")[0] for part in combinations[0]]
    if options.choose is not None and (options.choose not in names or options.choose == "seed"):
        raise UserError(f"--choose {options.choose}: must be a setting of --sweep other than seed")
    devices = _devices(options.devices)
    if "" in devices or len({*devices}) < len(devices):
        raise UserError(f"--devices {options.devices!r}: must be different GPUs, such as 0,1; --jobs shares each")
    longest = max(map(run_name, combinations), key=lambda name: len(name.encode()))
    if len(longest.encode()) > MAX_NAME_BYTES:
        raise UserError(
            f"--sweep: the folder name {longest} has more than {MAX_NAME_BYTES} bytes; pass settings that all runs "
            "share as --config.SECTION.SETTING=VALUE, or long values as variants of the config"
        )


def check_settings(overrides: Sequence[str], combinations: Sequence[Combination]) -> None:
    """Raises `UserError` for a setting that both `--sweep` and the command line set."""
    given = {override.partition("=")[0].removeprefix("--config.") for override in overrides}
    if both := sorted(given & {text.partition("=")[0] for combination in combinations for text in combination}):
        raise UserError(f"--sweep and --config.{both[0]} both set {both[0]}: leave one of them out")


def check_files(options: argparse.Namespace, folder: Path) -> None:
    """Checks `--record` and `--plot` before anything is trained.

    Raises:
        UserError: a file cannot be written or is the sweep's own, or matplotlib is missing.
    """
    for flag, path in (("--record", options.record), ("--plot", options.plot)):
        if path and resolved(path) in (resolved(folder) / RESULTS, resolved(folder) / CONFIGS):
            raise UserError(f"{flag} {path}: is a file that the sweep writes itself; name another")
    if options.record:
        check_writable(options.record)
    if options.plot:
        sweep_plot.check_plot(options.plot)
        check_writable(options.plot, "--plot")


def check_comparable(configs: Sequence[Config], combinations: Sequence[Combination]) -> None:
    """Raises `UserError` if two configs are equal, or their values of `train.metric` cannot be compared."""
    earlier: dict[Config, Combination] = {}
    for cfg, combination in zip(configs, combinations, strict=True):
        if cfg in earlier:
            raise UserError(
                f"--sweep: {' '.join(earlier[cfg])} and {' '.join(combination)} are the same run; leave out one"
            )
        earlier[cfg] = combination
        if problem := comparable.difference(flat(configs[0]), flat(cfg)):
            pair = f"{' '.join(combinations[0])} and {' '.join(combination)}"
            raise UserError(f"--sweep: {pair} are not comparable: {problem}")


def check_same_sweep(folder: Path, configs: Sequence[Config], combinations: Sequence[Combination]) -> None:
    """Creates the folder of a sweep, or checks that the runs in it have the same configs.

    Raises:
        UserError: it holds runs of other configs, or cannot be written.
    """
    path = folder / CONFIGS
    wanted = {run_name(combination): cfg for combination, cfg in zip(combinations, configs, strict=True)}
    try:
        earlier: dict[str, Any] = {**json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): remove it, and the sweep writes it again") from None
    for name, cfg in wanted.items():
        changed = _differences(earlier[name], cfg) if name in earlier and (folder / name).exists() else []
        if changed := changed or _differences_of_run(folder / name, cfg):
            remedy = f"choose another --output, or remove {folder / name}, which the same command then trains again"
            raise UserError(f"{folder} is a sweep of another config ({changed[0]}): {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**earlier, **{name: to_dict(cfg) for name, cfg in wanted.items()}})
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another --output") from error


def _differences(earlier: Mapping[str, Any], cfg: Config) -> list[str]:
    """Returns the settings in which a config differs from a saved one; settings that are new since have defaults."""
    try:
        return differences(Config.from_dict(earlier), cfg)
    except (UserError, TypeError, AttributeError) as error:  # of another version, or not a config
        return [str(error)]


def _differences_of_run(run: Path, cfg: Config) -> list[str]:
    """Returns the settings in which a config differs from a run's config, except sizes that the data determine."""
    if not (run / "config.json").exists():
        return []
    sizes = tuple(f"model.{name}:" for name in ("vocab_size", "source_vocab_size", "num_classes"))
    changed = _differences(read_json(run / "config.json"), cfg)
    return [text for text in changed if not (text.startswith(sizes) and text.endswith("-> None"))]


def train_all(
    options: argparse.Namespace, overrides: Sequence[str], combinations: Sequence[Combination], folder: Path
) -> list[str]:
    """Trains the combinations that are not finished, several at a time; returns the errors of failed runs.

    A signal stops the runs, each after a checkpoint, and exits with 128 + its number.
    """
    slots: queue.Queue[str | None] = queue.Queue()
    for device in _devices(options.devices) * options.jobs:
        slots.put(device)
    with Children() as children, concurrent.futures.ThreadPoolExecutor(slots.qsize()) as pool:
        jobs = [
            pool.submit(
                train_combination, options, overrides, combination, folder / run_name(combination), slots, children
            )
            for combination in combinations
        ]
        problems = [problem for job in jobs if (problem := job.result())]
    if children.stopped_by is not None:
        print("stopped: the same command continues the sweep", file=sys.stderr)
        sys.exit(128 + children.stopped_by)
    return problems


def train_combination(
    options: argparse.Namespace,
    overrides: Sequence[str],
    combination: Combination,
    run: Path,
    slots: queue.Queue,
    children: Children,
) -> str | None:
    """Trains one combination on a free device; returns the error, or None, also if a signal stopped it."""
    if (run / "result.json").exists():
        return None
    device = slots.get()
    try:
        if children.stopped_by is not None:
            return None
        print_line(f"{run}: training" + (f" on device {device}" if device is not None else ""))
        config = config_location(options.config, combination)
        command = [sys.executable, "-c", TRAIN, f"--config={config}", *overrides, *setting_flags(combination)]
        command += [f"--run={run}", "--resume"]
        log = run.with_name(f"{run.name}.log")
        with log.open("a", encoding="utf-8") as output:
            start = output.tell()
            status = children.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=run_environment(options, device)
            )
        if status == 0 or children.stopped_by is not None:
            return None
        problem = describe_failure(status, log.read_bytes()[start:].decode(errors="replace"))
        print_line(f"{run}: failed: {problem}")
        return f"{run}: {problem} (full log: {log})"
    finally:
        slots.put(device)


def print_line(text: str) -> None:
    """Prints a line; a sweep outlives the reader of its output."""
    RunConsole(markup=False, emoji=False, highlight=False, soft_wrap=True).print(text)


def describe_failure(status: int, output: str) -> str:
    """Returns why a run failed: its error, or else its exit status, or the signal that killed it, and its last line."""
    lines = output.split("\n")
    if errors := [line for line in lines if line.startswith("error: ")]:
        return ADVICE.split(errors[-1])[0].replace(OTHER_FOLDER, ", then repeat the command")
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{ended} after: {next(filter(None, reversed(lines)), 'no output')}"


def run_environment(options: argparse.Namespace, device: str | None) -> dict[str, str]:
    """Returns the environment of a run on `device`."""
    shared = SHARED_DEVICE if options.jobs > 1 else {}
    data = {DATA_VARIABLE: str(options.data)} if options.data else {}
    return {**shared, **os.environ, **data} | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})


def print_results(options: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """Writes a record where `options` say so, prints its table, and draws its plot.

    A terminal that is too narrow for all metrics shows only the metric that selects models.
    """
    if options.record:
        write_json(options.record, record)
    every = dict.fromkeys(name for group in record["groups"] for name in group["mean"])
    names = [name for name in every if not group_of_metric(name) or name == record["metric"]]
    console, view = table_console(RunConsole), result_table(record, names)
    if Measurement.get(console, console.options.update(max_width=sys.maxsize), view).maximum > console.width:
        view = result_table(record, [record["metric"]])
    console.print(view)
    if options.plot:
        sweep_plot.draw_plot(record, options.plot)


def result_table(record: Mapping[str, Any], names: Sequence[str]) -> Table:
    """Returns a table of the test metrics `names` in the order of the sweep: means over seeds with 95 % intervals."""
    groups, metric = record["groups"], record["metric"]
    best = min(groups, key=lambda group: sweeps.badness(group["mean"].get(metric), metric))
    count = len(record["runs"])
    title = f"{counted(count, 'run')}; ± half of the 95 % interval of the mean; bold: best {metric}"
    seconds = record["equal_seconds"]
    timed = [f"validation {metric}\nafter {seconds:,.0f} s"] if seconds else []
    headings = ("settings", "seeds", "parameters", "tokens/s", *names, *timed)
    view = make_table(headings, (), left=len(headings), title=title)
    for group in groups:
        facts = str(group["seeds"]), f"{group['parameters']:,}", f"{group['tokens_per_second']:,.0f}"
        cells = [sweeps.format_mean(group["mean"].get(name), group["interval"].get(name)) for name in names]
        cells += [sweeps.format_mean(*group["at_equal_seconds"].values())] if seconds else []
        view.add_row(escape("  ".join(group["settings"])), *facts, *cells, style="bold" if group is best else None)
    return view


def _devices(listed: str | None) -> list[str | None]:
    """Returns the GPUs of `--devices`; [None] without the flag: the device that JAX chooses."""
    return [None] if listed is None else [device.strip() for device in listed.split(",")]


def _split_values(values: str) -> list[str]:
    """Splits at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
