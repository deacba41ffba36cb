"""Flags for the settings of `DecodeConfig`, and other flags that `translate.py` and `generate.py` share."""

import argparse
import dataclasses
import types
import typing
from typing import Any

from tformer_jax.cli import interactive, lines
from tformer_jax.cli.common import integer
from tformer_jax.config import DecodeConfig
from tformer_jax.config.fields import allowed_types, flag

METAVARS = {int: "N", float: "X", str: "TEXT"}
OUTPUTS = {"seq2seq": "--n-best", "decoder_lm": "--samples"}
"""Flag for the number of outputs, by model family."""


def add_all_flags(parser: argparse.ArgumentParser, family: str) -> None:
    """Adds the flags that both commands have in addition to those of `lines.parser`."""
    lines.add_field(parser)
    add_flags(parser, family)
    interactive.add_flag(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting of `DecodeConfig`."""
    group = parser.add_argument_group("generation", "The default of each flag is the setting of the run.")
    annotations = typing.get_type_hints(DecodeConfig)
    for field in dataclasses.fields(DecodeConfig):
        _add_flag(group, field, annotations[field.name])


def add_flags(parser: argparse.ArgumentParser, family: str) -> None:
    """Adds the decoding settings, the number of outputs, `--seed` and `--scores`."""
    add_settings(parser)
    parser.add_argument(
        OUTPUTS[family], dest="outputs", type=integer(1), default=1, metavar="N", help="outputs per text (default: 1)"
    )
    parser.add_argument("--seed", type=integer(0), default=0, metavar="S", help="random seed (default: 0)")
    parser.add_argument(
        "--scores",
        action="store_true",
        help="write the score and a tab before each output; neither it nor its length counts tokens of decode.prefix",
    )


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that are given on the command line, by name."""
    named = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(DecodeConfig)}
    return {name: value for name, value in named.items() if value is not None}


def _add_flag(group: Any, field: dataclasses.Field, annotation: Any) -> None:
    kinds = [kind for kind in allowed_types(annotation) if kind is not types.NoneType]
    users = "".join(f"{strategy}: " for strategy in field.metadata["used_by"].get("strategy", ()))
    meaning = users + field.metadata["meaning"].replace("%", "%%")
    options: dict[str, Any] = {"dest": field.name, "help": meaning}
    if tuple in kinds:
        options |= {"action": "append", "metavar": "TEXT", "help": f"{meaning} (repeatable)"}
    elif bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
    else:
        choices = field.metadata["choices"]
        options |= {"type": kinds[0], "metavar": "{" + ",".join(choices) + "}" if choices else METAVARS[kinds[0]]}
    group.add_argument(flag(field.name), **options)
