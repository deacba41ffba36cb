"""Configs in Python: `tj.configs.load`, `tj.configs.change`, `tj.configs.names` and `tj.help`."""

import functools
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer_jax import config
from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.cli.config_file import config_path, run_file, shipped_configs
from tformer_jax.config import Config
from tformer_jax.config.fields import qualified
from tformer_jax.config.help import explain

__all__ = ["change", "help", "load", "names"]


def names() -> list[str]:
    """Returns the names of the configs of the package."""
    return sorted(shipped_configs())


def load(location: str | Path, /, **changes: Any) -> Config:
    """Reads a config file, or a config of the package by its name, such as "translate_cldr".

    Args:
        location: `FILE` or `FILE:VARIANT`.
        changes: as for `change`.

    Raises:
        UserError: the file is missing or has a mistake, or as for `change`.
    """
    check_type("the config", location, (str, Path), "a file or a name of `tj.configs.names()`; a Config needs no load")
    name, colon, variant = str(location).partition(":")
    return _changed(run_file(config_path(name), [variant] if colon else []).to_dict(), changes)


def change(cfg: Config, /, **changes: Any) -> Config:
    """Returns a config with other values.

    Args:
        changes: dictionaries by section, `train={"steps": 100}`, or values by full name, `**{"train.steps": 100}`.

    Raises:
        UserError: a setting is unknown or given twice, or a value is not allowed or does not fit the others.
    """
    check_type("the config", cfg, Config, "a Config, such as tj.configs.load('translate_cldr') or run.config")
    return _changed(config.to_dict(cfg), changes)


def help(name: str = "") -> None:
    """Prints meaning, default and allowed values of a setting, such as "model.dim", or of all in a section."""
    print(explain(name))


def _changed(values: dict[str, Any], changes: Mapping[str, Any]) -> Config:
    changed: set[str] = set()
    for name, value in _by_full_name(values, changes, ""):
        prefix = f"{name}."
        if any(prefix.startswith(other) or other.startswith(prefix) for other in changed):
            raise UserError(f"{name} is given twice: write it once")
        changed.add(prefix)
        *sections, last = name.split(".")
        functools.reduce(operator.getitem, sections, values)[last] = value
    return Config.from_dict(values)


def _by_full_name(values: Mapping[str, Any], changes: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the full name and the value of each change, given the values of the section `path`."""
    for name, value in changes.items():
        Config.check_name(full := qualified(path, name))
        before = functools.reduce(operator.getitem, name.split("."), values)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from _by_full_name(before, value, full)
        else:
            yield full, value
