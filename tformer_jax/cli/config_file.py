"""Reads config files and overrides of their settings; each mistake is reported in one sentence."""

import ast
import contextlib
import dataclasses
import importlib.machinery
import inspect
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError, one_line
from tformer_jax.config import Config, change_settings
from tformer_jax.config.fields import Section, allowed_types

SYNTAX = "settings are written --config.SECTION.SETTING=VALUE"
EXPECTED = {
    bool: "must be True or False",
    int: "must be a whole number, such as 1000",
    float: "must be a number, such as 0.001",
    tuple: "must be values separated by commas, such as ('a b',)",
}
"""What settings must be, by type."""
BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def read_config(location: str, overrides: Sequence[str] = ()) -> Config:
    """Reads and validates the config of a file, `FILE[:VARIANT]`, with `--config.SECTION.SETTING=VALUE` overrides.

    Raises:
        UserError: the file is missing, a setting or flag is unknown, or a value is invalid.
    """
    name, colon, variant = location.partition(":")
    path = Path(name)
    if not path.is_file():
        problem = "is a folder; name a file in it" if path.is_dir() else f"does not exist{_available_configs(path)}"
        raise UserError(f"config file {path} {problem}")
    settings = read_overrides(overrides)
    cfg = run_file(path, [variant] if colon else [])
    return change_settings(cfg, settings) if settings else cfg


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the values of overrides by the full name of the setting; the last override of a setting counts.

    Raises:
        UserError: a setting is unknown, a value has another type, or an argument is no override.
    """
    settings: dict[str, Any] = {}
    rest = list(overrides)
    while rest:
        override = re.fullmatch(r"--?(no)?config\.([^=]*)(?:=(.*))?", argument := rest.pop(0), re.DOTALL)
        if override is None:
            flag = re.match(r"--?([a-z]\w*)", argument)
            problem = f"unknown flag {flag[0]!r}" if flag else f"unexpected argument {argument!r}"
            raise UserError(f"{problem}; {SYNTAX}")
        negated, name, text = override.groups()
        kinds = setting_types(name)
        if text is None and bool in kinds:
            text = "False" if negated else "True"
        elif text is None and not rest:
            raise UserError(f"{name} has no value; {SYNTAX}")
        settings[name] = read_value(name, kinds, rest.pop(0) if text is None else text)
    return settings


def setting_types(name: str) -> list[type]:
    """Returns the types that the setting `name`, such as `model.dim`, may have besides None.

    Raises:
        UserError: the setting is unknown, or a section.
    """
    Config.check_name(name)
    section: type[Section] = Config
    *sections, last = name.split(".")
    for part in sections:
        section = section.nested()[part]
    if last in section.nested():
        raise UserError(f"{name} is a section: write --config.{name}.SETTING=VALUE")
    return [kind for kind in allowed_types(typing.get_type_hints(section)[last]) if kind is not types.NoneType]


def read_value(name: str, kinds: Sequence[type], text: str) -> Any:
    """Parses the value of a setting of these types; `None` is the value None.

    Raises:
        UserError: it has another type.
    """
    if text == "None":
        return None
    try:
        if bool in kinds:
            return BOOLEANS[text.lower()]
        if tuple in kinds:
            return read_tuple(text)
        return int(text, 0) if int in kinds else kinds[0](text)
    except (KeyError, SyntaxError, ValueError):
        raise UserError(f"{name}={text!r}: {EXPECTED[kinds[0]]}") from None


def read_tuple(text: str) -> tuple[Any, ...]:
    """Parses a tuple, a list, or a single value, which may be a text without quotes.

    Raises:
        SyntaxError: a text without quotes has commas or spaces.
    """
    try:
        value = ast.literal_eval(text)
    except ValueError:
        value = text
    except SyntaxError:
        if "," in text or " " in text:
            raise
        value = text
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def run_file(path: Path, variant: Sequence[str]) -> Config:
    """Returns the result of `get_config` in a config file, which may import files beside it.

    Args:
        variant: the arguments of `get_config`: the name of a variant, or none.

    Raises:
        UserError: the file raises it, or has a mistake.
    """
    loader = importlib.machinery.SourceFileLoader("config_file", str(path))
    module = types.ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # where the decorator of a dataclass in the file looks for it
    with mistakes_in(path), _importing_from(path.parent):
        loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise UserError(f"{path} has no function get_config, which returns a Config(...)")
    try:
        inspect.signature(get_config).bind(*variant)
    except TypeError:
        problem = "has no variants: leave out the colon" if variant else "needs a variant after a colon"
        raise UserError(f"{path} {problem}") from None
    with mistakes_in(path):
        cfg = get_config(*variant)
    if not isinstance(cfg, Config):
        raise UserError(f"{path}: get_config must return a Config(...), not {type(cfg).__name__}")
    return cfg


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Context in which the modules of a folder can be imported."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.absolute()))


@contextlib.contextmanager
def mistakes_in(path: Path) -> Iterator[None]:
    """Context manager that reports an exception in a config file as a `UserError` with its line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        text = str(error)
        if isinstance(error, SyntaxError):
            lines, text = [error.lineno], error.msg
        elif isinstance(error, dataclasses.FrozenInstanceError):
            text += ": write change_settings(cfg, {'SECTION.SETTING': VALUE}) or dataclasses.replace"
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        try:
            _check_keyword(text)
        except UserError as unknown:
            raise UserError(f"{where}: {unknown}") from error
        raise UserError(f"{where}: {type(error).__name__}: {one_line(text, None)}") from error


def _check_keyword(problem: str) -> None:
    """Raises `UserError` with the nearest setting if Python says that a section does not have a keyword."""
    sections: list[type[Section]] = [Config]
    for section in sections:
        sections += section.nested().values()
        if keyword := re.match(
            rf"{section.__name__}\.__init__\(\) got an unexpected keyword argument '(.*?)'", problem
        ):
            section.check_name(keyword[1])


def _available_configs(path: Path) -> str:
    files = sorted(str(file) for file in path.parent.glob("*.py"))
    return f"; in {path.parent} are {', '.join(files)}" if files else ""
