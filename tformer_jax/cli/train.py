"""`scripts/train.py`: trains the experiment that a config file describes."""

import argparse
import logging
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from tformer_jax import config
from tformer_jax.allocator import run_in_calling_thread
from tformer_jax.cli import config_file
from tformer_jax.cli.common import INTERRUPTED, add_data, run_path
from tformer_jax.config import Config, ConfigError
from tformer_jax.config.paths import is_remote


def main(argv: Sequence[str] | None = None) -> None:
    """Trains a config, records the result with its curves, and writes the report; exits with 130 if interrupted."""
    options, overrides = parser().parse_known_args(argv)
    cfg = read_config(options.config, overrides)
    run_in_calling_thread()
    from tformer_jax.parallel import multihost
    from tformer_jax.train import curves, experiment, loop, profiler, run_folder

    folder = options.run or Path("runs") / cfg.name
    from tformer_jax.cli import report

    if options.profile and cfg.train.steps < profiler.NEEDED:
        problem = f"must be at least {profiler.NEEDED} for --profile, which skips the first {profiler.SKIPPED}"
        raise cfg.train.error("steps", problem)
    if options.profile and is_remote(folder):
        raise ConfigError(f"--profile cannot write to {folder}: profile {profiler.NEEDED} steps with a local --run")
    if cfg.train.report:
        report.html.check_installed("train.report=True")
    group = multihost.start(cfg.parallel, folder, options.coordinator, options.processes, options.process)
    if options.record:
        group.run(lambda: check_writable(options.record) if group.first else None)
    built = experiment.build(
        cfg, folder, data_root=options.data, resume=options.resume, overwrite=options.overwrite, group=group
    )
    try:
        result = loop.run(built, profile=options.profile)
    finally:
        if cfg.train.report and group.first:
            write_report(folder)
    if result is not None and options.record and group.first:
        run_folder.write_json(options.record, result | {"curves": curves.read(folder)})
    if result is None:
        sys.exit(INTERRUPTED)


def write_report(folder: Path) -> None:
    """Writes the report of a run that has ended; warns if that fails, because the run may have an error of its own."""
    from tformer_jax.cli import report

    try:
        report.write([folder], folder / report.NAME)
    except ConfigError as error:
        logging.warning("%s", error)


def parser() -> argparse.ArgumentParser:
    """Returns the parser; settings of the config are separate: `--config.SECTION.SETTING=VALUE`."""
    result = argparse.ArgumentParser(
        prog="train.py",
        description="Trains the experiment that a config file describes, then evaluates it.",
        epilog="Every setting of the config can be changed: --config.train.steps=100 --config.model.dim=64",
        allow_abbrev=False,
    )
    result.add_argument(
        "--config", required=True, metavar="FILE[:VARIANT]", help="for example configs/translate_cldr.py"
    )
    result.add_argument("--run", type=run_path, metavar="DIR", help="run folder (default: runs/NAME of the config)")
    existing = result.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run that the folder holds, if any")
    existing.add_argument("--overwrite", action="store_true", help="replace the run that the folder holds")
    result.add_argument("--profile", action="store_true", help="write a trace of some steps for TensorBoard")
    result.add_argument("--record", type=Path, metavar="FILE", help="also write the result and curves to this file")
    add_data(result)
    several = result.add_argument_group(
        "several processes", "Detected by JAX on Slurm, Open MPI, Kubernetes and Cloud TPU. All share one run folder."
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 and a free port there")
    several.add_argument("--processes", type=int, metavar="N", help="number of processes; 1: only this one")
    several.add_argument("--process", type=int, metavar="I", help="index of this process, from 0 to N - 1")
    return result


def read_config(location: str, overrides: Sequence[str] = ()) -> Config:
    """Reads and validates the config of a file, `FILE[:VARIANT]`, with `--config.SECTION.SETTING=VALUE` overrides.

    Raises:
        ConfigError: the file is missing, a setting or flag is unknown, or a value is invalid.
    """
    name, colon, variant = location.partition(":")
    path = Path(name)
    if not path.is_file():
        problem = "is a folder; name a file in it" if path.is_dir() else f"does not exist{_available_configs(path)}"
        raise ConfigError(f"config file {path} {problem}")
    for override in overrides:
        if setting := re.match(r"--?(no)?config\.(?P<name>[^=]*)", override):
            Config.check_name(setting["name"])
        elif flag := re.match(r"--?([a-z]\w*)", override):
            raise ConfigError(f"unknown flag {flag[0]!r}; settings are written --config.SECTION.SETTING=VALUE")
    values = flags.FlagValues()
    overrides, unset = _split(overrides)
    arguments = ["train.py", *overrides]
    found = config_file.run(path, [variant] if colon else [])
    try:
        config_flags.DEFINE_config_dict("config", found, flag_values=values, sys_argv=arguments)
        unexpected = values(arguments)[1:]
    except (AttributeError, KeyError) as error:
        raise ConfigError(
            f"{path} lacks a setting given on the command line: get_config must return to_config_dict(Config(...))"
        ) from error
    except (flags.Error, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if unexpected:
        raise ConfigError(f"unexpected argument {unexpected[0]!r}; settings are written --config.SECTION.SETTING=VALUE")
    values.config.update_from_flattened_dict(dict.fromkeys(unset))
    return config.from_config_dict(values.config)


def _split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides with values, and the settings that `--config.SECTION.SETTING=None` sets to None.

    absl has no syntax for None. The last override of a setting counts.
    """
    last = {override.partition("=")[0]: override for override in overrides}
    unset = [name.removeprefix("--config.") for name, override in last.items() if override == f"{name}=None"]
    return [override for override in overrides if override != f"{override.partition('=')[0]}=None"], unset


def check_writable(path: Path, flag: str = "--record") -> None:
    """Checks, before training, that `path`, which `flag` names, can be written; creates its folder.

    Raises:
        ConfigError: the folder cannot be created or written to, the name is too long, or `path` is a folder.
    """
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: cannot be written, because it is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = f".{path.name}."  # the record is written under a name as long as this file's
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=partial).close()
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); name a file in a writable folder"
        raise ConfigError(f"{flag} {path}: {problem}") from error


def check_writable_folder(path: Path, flag: str) -> None:
    """Checks, before anything is computed, that the folder `path`, which `flag` names, can be created.

    Raises:
        ConfigError: its parent cannot be created or written to.
    """
    parent = path.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=parent, prefix=f".{path.name}.").cleanup()
    except OSError as error:
        reason = f"{parent} is a file" if parent.is_file() else error.strerror
        problem = f"cannot be written ({reason}); name a folder in a writable folder"
        raise ConfigError(f"{flag} {path}: {problem}") from error


def _available_configs(path: Path) -> str:
    files = sorted(str(file) for file in path.parent.glob("*.py"))
    return f"; in {path.parent} are {', '.join(files)}" if files else ""
