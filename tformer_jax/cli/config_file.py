"""Reads config files and overrides of their settings; each mistake is reported in one sentence."""

import argparse
import contextlib
import dataclasses
import importlib.machinery
import inspect
import operator
import re
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

import tformer_jax
from tformer_jax import config
from tformer_jax.base.errors import UserError, one_line
from tformer_jax.cli.common import add_imports
from tformer_jax.config import Config, kinds
from tformer_jax.config.fields import ConfigError, Section, nearest
from tformer_jax.config.kinds import import_modules

EXPECTED = {
    int: "must be a whole number, such as 1000",
    float: "must be a number, such as 0.001",
    bool: "must be True or False",
}
"""What settings must be, by the type of their values in a config file."""


def read_config(location: str, overrides: Sequence[str] = ()) -> Config:
    """Reads and validates the config of `FILE[:VARIANT]` with `--config.SECTION.SETTING=VALUE` overrides.

    Without such a file, `FILE` is the name of a config of the package.
    `--import MODULE` among the overrides imports a module that registers kinds, and adds it to `imports`.

    Raises:
        UserError: the file is missing, a setting or flag is unknown or written twice, a value is invalid, or no module
            is recorded that registers a kind of other code.
    """
    name, colon, variant = location.partition(":")
    path = config_path(name)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_imports(parser)
    options, overrides = parser.parse_known_args(overrides)
    given: set[str] = set()
    for override in overrides:
        if setting := re.match(r"--?(no)?config\.(?P<name>[^=]*)", override):
            Config.check_name(setting["name"])
            if setting["name"] in given:
                raise UserError(f"--config.{setting['name']} is written twice; write it once")
            given.add(setting["name"])
            if _is_section(setting["name"]):
                raise UserError(f"{setting['name']} is a section: write --config.{setting['name']}.SETTING=VALUE")
        elif flag := re.match(r"--?([a-z]\w*)", override):
            raise UserError(f"unknown flag {flag[0]!r}; settings are written --config.SECTION.SETTING=VALUE")
    values = flags.FlagValues()
    overrides, unset = _split_off_none(overrides)
    arguments = ["train.py", *overrides]
    import_modules(options.imports)
    values_of_file = run_file(path, [variant] if colon else [])
    try:
        config_flags.DEFINE_config_dict("config", values_of_file, flag_values=values, sys_argv=arguments)
        unexpected = values(arguments)[1:]
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"{path} lacks a setting given on the command line: get_config must return to_config_dict(Config(...))"
        ) from error
    except (flags.Error, ValueError) as error:
        problem = one_line(error, None)
        flag = re.match(r"flag --config\.(?P<name>[\w.]+)=(?P<value>.*?): ", problem)
        if flag and (expected := EXPECTED.get(type(operator.attrgetter(flag["name"])(values_of_file)))):
            problem = f"{flag['name']}={flag['value']!r}: {expected}"
        raise UserError(problem) from error
    if unexpected:
        raise UserError(f"unexpected argument {unexpected[0]!r}; settings are written --config.SECTION.SETTING=VALUE")
    values.config.update_from_flattened_dict(dict.fromkeys(unset))
    if options.imports:
        values.config.imports = tuple(dict.fromkeys((*values.config.imports, *options.imports)))
    cfg = config.from_config_dict(values.config)
    if not cfg.imports and (outside := next(cfg.outside_kinds(), None)):
        problem = "no module is recorded from which other commands get this kind"
        raise UserError(f"{outside}: {problem}; write --import MODULE, or imports=('MODULE',) in the config")
    return cfg


def _is_section(name: str) -> bool:
    kind: type[Section] | None = Config
    for part in name.split("."):
        kind = kind.nested().get(part) if kind else None
    return kind is not None


def _split_off_none(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides with values, and the settings that `--config.SECTION.SETTING=None` sets to None.

    absl has no syntax for None.
    """
    joined: list[str] = []
    for override in overrides:
        if override == "None" and joined and "=" not in joined[-1]:
            joined[-1] += "=None"
        else:
            joined.append(override)
    nones = [override for override in joined if override.endswith("=None") and override.count("=") == 1]
    unset = [override.removesuffix("=None").removeprefix("--config.") for override in nones]
    return [override for override in joined if override not in nones], unset


def run_file(path: Path, variant: Sequence[str]) -> ConfigDict:
    """Returns the result of `get_config` in a config file, which may import files beside it, or a run's `config.json`.

    Args:
        variant: the arguments of `get_config`: the name of a variant, or none.

    Raises:
        UserError: the file raises it, or has a mistake.
    """
    if path.suffix == ".json":
        if variant:
            raise UserError(f"{path} has no variants: leave out the colon")
        return config.to_config_dict(_starting_from_import(config.load(path), path.parent))
    loader = importlib.machinery.SourceFileLoader("config_file", str(path))
    module = types.ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # where the decorator of a dataclass in the file looks for it
    with _own_modules(path.parent) as remaining:
        values = _values_of_file(path, loader, module, variant)
        remaining += values.get("imports") or ()
    return values


def _starting_from_import(cfg: Config, run: Path) -> Config:
    """Returns the config of a run; if the run was imported, the config trains its parameters, not new ones."""
    from tformer_jax.runs.run_folder import IMPORTED

    if cfg.train.start_from is not None or not (run / IMPORTED).is_file():
        return cfg
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, start_from=str(run)))


def _values_of_file(path: Path, loader: Any, module: types.ModuleType, variant: Sequence[str]) -> ConfigDict:
    """Executes a config file as `module` and returns the result of its `get_config`; raises as `run_file`."""
    with mistakes_in(path), _importing_from(path.parent):
        loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise UserError(f"{path} has no function get_config that returns to_config_dict(Config(...))")
    try:
        inspect.signature(get_config).bind(*variant)
    except TypeError:
        problem = "has no variants: leave out the colon" if variant else "needs a variant after a colon"
        raise UserError(f"{path} {problem}") from None
    with mistakes_in(path), _importing_from(path.parent):
        values = get_config(*variant)
    if not isinstance(values, ConfigDict):
        returned = type(values).__name__
        raise UserError(f"{path}: get_config must return to_config_dict(Config(...)), a ConfigDict, not {returned}")
    return values


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Context in which the modules of a folder can be imported."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.absolute()))


@contextlib.contextmanager
def _own_modules(folder: Path) -> Iterator[list[str]]:
    """Context that unloads the modules of a folder at its end, because other folders may use the same module names.

    Modules imported before the context stay loaded; so do all modules if kinds were registered within it. Yields the
    list of modules that stay; callers may add names.
    """
    folder, remaining, before = folder.absolute(), [*sys.modules], _registered()
    try:
        yield remaining
    finally:
        stays = {name.partition(".")[0] for name in remaining}
        for name, module in [*sys.modules.items()] if before == _registered() else ():
            top = name.partition(".")[0]
            file = Path(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), ""))
            if top not in stays and (file == folder / f"{top}.py" or file.is_relative_to(folder / top)):
                del sys.modules[name]


def _registered() -> list[dict[str, Any]]:
    return [{**registry} for registry in vars(kinds).values() if isinstance(registry, kinds.Kinds)]


@contextlib.contextmanager
def mistakes_in(path: Path) -> Iterator[None]:
    """Context manager that reports an exception in a config file, or an invalid setting, with its line."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{_place(path, error)}: {error}") from error
    except UserError:
        raise
    except Exception as error:
        if hint := re.search(r'Did you mean "(.+?)" instead of "(.+?)"', str(error)):
            raise UserError(f"{path}: unknown setting {hint[2]!r}; did you mean {hint[1]!r}?") from error
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        reason = one_line(text.partition(". Other fields present")[0], None)  # of a locked ConfigDict
        raise UserError(f"{_place(path, error)}: {type(error).__name__}: {reason}{_to_copy(error)}") from error


def _place(path: Path, error: Exception) -> str:
    """Returns a config file with the line in which an exception was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _to_copy(error: Exception) -> str:
    """Returns a clause about the module that a copy of one of the package's configs lacks; "" for another mistake."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    folder = next(iter(shipped_configs().values())).parent
    beside = [path for path in (folder / error.name, folder / f"{error.name}.py") if path.exists()]
    return f"; copy {beside[0]} beside the config, which imports it" if beside else ""


def config_path(name: str) -> Path:
    """Returns the path of a config file, or of the config of this name in the package.

    Raises:
        UserError: there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if shipped := shipped_configs().get(name.removesuffix(".py")):
        return shipped
    if (path / "config.json").is_file():
        return path / "config.json"
    problem = "is a folder; name a file in it" if path.is_dir() else f"does not exist{_available_configs(path)}"
    raise UserError(f"config file {path} {problem}")


def shipped_configs() -> dict[str, Path]:
    """Returns the config files of the package by name: the folder `shipped` in a wheel, else `configs`."""
    package = Path(tformer_jax.__file__).parent
    files = [*package.glob("shipped/*.py")] or package.parent.glob("configs/*.py")
    return {file.stem: file for file in sorted(files)}


def _available_configs(path: Path) -> str:
    if len(path.parts) == 1:
        return f"{nearest(path.stem, shipped_configs())}; `tformer configs` lists the package's configs"
    files = sorted(str(file) for file in path.parent.glob("*.py"))
    return f"; in {path.parent} are {', '.join(files)}" if files else ""
