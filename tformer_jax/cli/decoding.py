"""Flags of `translate.py` and `generate.py`: one for each setting of `DecodeConfig`, and others of these commands."""

import argparse
import dataclasses
import types
import typing
from typing import Any

from tformer_jax.cli import interactive, lines
from tformer_jax.cli.common import whole
from tformer_jax.config import ConfigError, DecodeConfig
from tformer_jax.config.fields import allowed_types

NAMES = {"forbidden": "forbid"}
"""Names of flags that differ from their settings."""
METAVARS = {int: "N", float: "X", str: "TEXT"}
SEVERAL = {"beam": "--n-best", "sample": "--samples"}
"""Flag for the number of outputs, by the strategy that it selects unless another one is requested."""
STRATEGIES = {"seq2seq": "beam", "decoder_lm": "sample"}
"""Strategy for several outputs, by model family."""


def add_all_flags(parser: argparse.ArgumentParser, family: str) -> None:
    """Adds the flags that both commands have in addition to those of `lines.parser`."""
    lines.add_field(parser)
    add_flags(parser, STRATEGIES[family])
    interactive.add_flag(parser)


def add_flags(parser: argparse.ArgumentParser, several: str) -> None:
    """Adds the flags of generation; `several` is a key of `SEVERAL`."""
    group = parser.add_argument_group("generation", "The default of each flag is the setting of the run.")
    annotations = typing.get_type_hints(DecodeConfig)
    for field in dataclasses.fields(DecodeConfig):
        _add_flag(group, field, annotations[field.name])
    parser.add_argument(
        SEVERAL[several], dest="outputs", type=whole(1), default=1, metavar="N", help="outputs per text (default: 1)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="random seed (default: 0)")
    parser.add_argument("--scores", action="store_true", help="write the score and a tab before each output")


def decode_config(saved: DecodeConfig, options: argparse.Namespace, several: str) -> DecodeConfig:
    """Returns the settings of the run, updated by the command line, which may select another strategy.

    Raises:
        ConfigError: a value is out of range, flags of two strategies are given, or there are too many outputs.
    """
    named = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(DecodeConfig)}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    result = saved.changed(given, flag)
    greedy = given.get("strategy") == "greedy" or given.get("temperature") == 0
    if options.outputs > 1 and result.strategy == "greedy" and not greedy:
        result = result.changed({"beams": options.outputs} if several == "beam" else {"strategy": several})
    if result.strategy == "greedy" and options.outputs > 1:
        raise ConfigError(f"{SEVERAL[several]} {options.outputs}: greedy decoding has one output")
    if result.strategy == "beam" and options.outputs > result.beams:
        wanted = f"{SEVERAL[several]} {options.outputs}"
        raise ConfigError(f"{wanted} needs at least as many beams: write --beams {options.outputs}")
    return result


def flag(name: str) -> str:
    """Returns the flag of a setting."""
    return f"--{NAMES.get(name, name).replace('_', '-')}"


def _add_flag(group: Any, field: dataclasses.Field, annotation: Any) -> None:
    kinds = [kind for kind in allowed_types(annotation) if kind is not types.NoneType]
    meaning = field.metadata["meaning"].replace("%", "%%")
    options: dict[str, Any] = {"dest": field.name, "help": meaning}
    if kinds == [bool]:
        options["action"] = argparse.BooleanOptionalAction
    elif tuple in kinds:
        options |= {"action": "append", "metavar": "TEXT", "help": f"{meaning} (repeatable)"}
    else:
        choices = field.metadata["choices"]
        options |= {"type": kinds[0], "metavar": "{" + ",".join(choices) + "}" if choices else METAVARS[kinds[0]]}
    group.add_argument(flag(field.name), **options)
