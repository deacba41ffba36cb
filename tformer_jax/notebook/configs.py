"""Configs in Python: `tj.configs.load`, `tj.configs.change`, `tj.configs.names` and `tj.help`."""

from collections.abc import Mapping
from typing import Any

from tformer_jax import config
from tformer_jax.cli.config_file import config_path, run_file, shipped_configs
from tformer_jax.config import Config
from tformer_jax.config.fields import qualified
from tformer_jax.config.help import explain

__all__ = ["change", "help", "load", "names"]


def names() -> list[str]:
    """Returns the names of the configs of the package."""
    return sorted(shipped_configs())


def load(location: str, /, **changes: Any) -> Config:
    """Reads a config file, or a config of the package by its name, such as "translate_cldr".

    Args:
        location: `FILE` or `FILE:VARIANT`.
        changes: as for `change`.

    Raises:
        UserError: the file is missing or has a mistake, or as for `change`.
    """
    name, colon, variant = location.partition(":")
    return _changed(run_file(config_path(name), [variant] if colon else []).to_dict(), changes)


def change(cfg: Config, /, **changes: Any) -> Config:
    """Returns a config with other values.

    Args:
        changes: dictionaries by section, `train={"steps": 100}`, or values by full name, `**{"train.steps": 100}`.

    Raises:
        UserError: a setting is unknown, or a value is not allowed or does not fit the others.
    """
    return _changed(config.to_dict(cfg), changes)


def help(name: str = "") -> None:
    """Prints meaning, default and allowed values of a setting, such as "model.dim", or of all in a section."""
    print(explain(name))


def _changed(values: dict[str, Any], changes: Mapping[str, Any]) -> Config:
    _update(values, changes, "")
    return Config.from_dict(values)


def _update(values: dict[str, Any], changes: Mapping[str, Any], path: str) -> None:
    for name, value in changes.items():
        Config.check_name(qualified(path, name))
        key, _, below = name.partition(".")
        if below:
            _update(values[key], {below: value}, qualified(path, key))
        elif isinstance(value, Mapping) and isinstance(values[key], Mapping):
            _update(values[key], value, qualified(path, key))
        else:
            values[key] = value
