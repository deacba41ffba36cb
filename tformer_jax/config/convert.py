"""Converts settings between frozen dataclasses, the ConfigDict of config files, and the JSON of run folders."""

import dataclasses
import json
import logging
import types
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from tformer_jax.base.checks import annotated_types
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import write_text
from tformer_jax.config.decode import DecodeConfig, EmbedConfig
from tformer_jax.config.fields import ConfigError, Section, UnknownKindError, allowed_types, qualified
from tformer_jax.config.parallel import ParallelConfig
from tformer_jax.config.schema import Config, EvalConfig

CHANGEABLE_SECTIONS: dict[str, type[Section]] = {
    "decode": DecodeConfig,
    "embed": EmbedConfig,
    "eval": EvalConfig,
    "parallel": ParallelConfig,
}
"""Sections that may differ each time a run is used."""


def to_config_dict(section: Section) -> ConfigDict:
    """Returns an editable ConfigDict with every setting of `section`, locked against other keys."""
    annotations = annotated_types(type(section))
    result = ConfigDict()
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            value = to_config_dict(value)
        elif isinstance(value, tuple):
            value = tuple(to_dict(part) if isinstance(part, Section) else part for part in value)
        elif value is None:
            kinds = [kind for kind in allowed_types(annotations[field.name]) if kind is not types.NoneType]
            value = config_dict.placeholder(kinds[0])
        result[field.name] = value
    result.lock()
    return result


def from_config_dict(values: ConfigDict) -> Config:
    """Builds the validated `Config` from the settings of a config file and the command line.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or range, or settings contradict each other.
    """
    return Config.from_dict(values.to_dict())


def to_dict(section: Section) -> dict[str, Any]:
    """Returns nested plain dictionaries, ready for JSON."""
    return dataclasses.asdict(section)


def save(cfg: Config, path: Path) -> None:
    """Writes the resolved config as indented JSON, atomically."""
    write_text(path, json.dumps(to_dict(cfg), indent=2, ensure_ascii=False) + "\n")


def load(path: Path) -> Config:
    """Reads a config that `save` wrote; ignores unknown settings of `CHANGEABLE_SECTIONS`, with a warning.

    Raises:
        UserError: the file is missing, is not JSON, or has another setting that is unknown to this version, or a kind
            that no import registers.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: {path.parent} is not a run folder") from None
    except ValueError as error:
        raise UserError(f"{path} is not a saved config: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a saved config: it has no sections")
    _adopt_bpe_dropout(values.get("data"))
    if ignored := _drop_unknown(values):
        logging.warning("%s: ignored settings that this version does not have: %s", path, ", ".join(ignored))
    try:
        return Config.from_dict(values)
    except UnknownKindError as error:
        raise UserError(f"{path}: {error}") from None
    except ConfigError as error:
        version = path.with_name("provenance.json")
        raise UserError(
            f"{path} was written by another version ({error}); use the version that {version} names"
        ) from None


def _adopt_bpe_dropout(data: Any) -> None:
    """Turns the setting `bpe_dropout` of `data` in earlier versions into the transform."""
    if isinstance(data, dict) and (rate := data.pop("bpe_dropout", 0)):
        data["transforms"] = ({"kind": "bpe_dropout", "rate": rate},)


def _drop_unknown(values: dict[str, Any]) -> list[str]:
    """Removes unknown settings from `CHANGEABLE_SECTIONS`, and returns their names."""
    dropped = []
    for name, kind in CHANGEABLE_SECTIONS.items():
        names = {field.name for field in dataclasses.fields(kind)}
        section = values.get(name)
        if isinstance(section, dict):  # else an error of `Config.from_dict`
            unknown = section.keys() - names
            values[name] = {key: value for key, value in section.items() if key in names}
            dropped += [f"{name}.{key}" for key in unknown]
    return sorted(dropped)


def differences(old: Config, new: Config) -> list[str]:
    """Returns the settings that differ, each as `model.dim: 256 -> 512`."""
    before, after = flat(old), flat(new)
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key]]


def flat(section: Section) -> dict[str, Any]:
    """Returns every setting of a section by its name there: `model.dim` in a `Config`, `dim` in a `ModelConfig`."""
    return flat_values(to_dict(section))


def flat_values(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the values of nested dictionaries by their full names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = qualified(path, key)
        flat.update(flat_values(value, name) if isinstance(value, dict) else {name: value})
    return flat
