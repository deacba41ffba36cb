"""`scripts/train.py`: trains the experiment that a config file describes."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base import checks
from tformer_jax.base.cpu import run_in_calling_thread
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import is_remote, resolved
from tformer_jax.cli import compilation_cache
from tformer_jax.cli.common import INTERRUPTED, add_data, add_path, check_writable, new_parser, run_path
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config


def main(argv: Sequence[str] | None = None) -> None:
    """Trains a config, records the result with its curves, and writes the report; exits with 130 if interrupted."""
    options, overrides = parser().parse_known_args(argv)
    cfg = read_config(options.config, overrides)
    folder = options.run or Path("runs") / cfg.name
    run_in_calling_thread()
    from tformer_jax.parallel import multihost
    from tformer_jax.runs import experiment, training

    check_flags(options, cfg, folder)
    group = multihost.start(cfg.parallel, folder, options.coordinator, options.processes, options.process)
    compilation_cache.disable_if_private(group.count)
    if options.record:
        group.run(lambda: check_writable(options.record) if group.first else None)
    built = experiment.build(
        cfg, folder, data_root=options.data, resume=options.resume, overwrite=options.overwrite, group=group
    )
    try:
        result = training.run(built, profile=options.profile)
    finally:
        if cfg.train.report and group.first:
            write_report(folder)
    if result is not None and options.record and group.first:
        write_record(options.record, result, folder)
    if result is None:
        sys.exit(INTERRUPTED)


def check_flags(options: argparse.Namespace, cfg: Config, folder: Path) -> None:
    """Raises `UserError` if flags and settings do not fit the run folder or each other, or need a missing package."""
    from tformer_jax.runs import profiler

    if options.profile and cfg.train.steps < profiler.NEEDED:
        problem = f"must be at least {profiler.NEEDED} for --profile, which skips the first {profiler.SKIPPED}"
        raise cfg.train.error("steps", problem)
    if options.profile and is_remote(folder):
        raise UserError(f"--profile cannot write to {folder}: profile {profiler.NEEDED} steps with a local --run")
    if options.record and resolved(options.record).is_relative_to(resolved(folder)):
        raise UserError(f"--record {options.record}: is in the run folder, which this run creates; name another")
    if cfg.train.report:
        checks.require_pages("train.report=True")


def write_record(path: Path, result: dict[str, Any], folder: Path) -> None:
    """Writes the result of a run with its curves."""
    from tformer_jax.runs import curves, run_folder

    run_folder.write_json(path, result | {"curves": curves.summarize_curves(folder)})


def write_report(folder: Path) -> None:
    """Writes the report of a run that has ended; warns if that fails, because the run may have an error of its own."""
    from tformer_jax.cli import report

    try:
        report.write_report([folder], folder / report.NAME)
    except UserError as error:
        logging.warning("%s", error)


class _Explain(argparse.Action):
    """Prints the meaning, default and allowed values of settings, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        from tformer_jax.config.help import explain

        print(explain(values))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Returns the parser; settings of the config are separate: `--config.SECTION.SETTING=VALUE`."""
    result = new_parser(
        "train",
        "Trains the experiment that a config file describes, then evaluates it.",
        epilog="Every setting of the config can be changed: --config.train.steps=100 --config.model.dim=64. "
        "--import MODULE imports a module that registers kinds, and the run records it.",
    )
    result.add_argument(
        "--config", required=True, metavar="FILE[:VARIANT]", help="for example configs/translate_cldr.py"
    )
    result.add_argument("--run", type=run_path, metavar="DIR", help="run folder (default: runs/NAME of the config)")
    result.add_argument(
        "--config.help", nargs="?", const="", action=_Explain, metavar="SECTION", help="explain settings and exit"
    )
    existing = result.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run that the folder holds, if any")
    existing.add_argument("--overwrite", action="store_true", help="replace the run that the folder holds")
    result.add_argument("--profile", action="store_true", help="write a trace of some steps for TensorBoard")
    add_path(result, "--record", "also write the result and curves to this file")
    add_data(result)
    several = result.add_argument_group(
        "several processes", "Detected by JAX on Slurm, Open MPI, Kubernetes and Cloud TPU. All share one run folder."
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 and a free port there")
    several.add_argument("--processes", type=int, metavar="N", help="number of processes; 1: only this one")
    several.add_argument("--process", type=int, metavar="I", help="index of this process, from 0 to N - 1")
    return result
