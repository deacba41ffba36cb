"""Checks of the types of arguments and of installed packages, each reported in a sentence that says what to do."""

import functools
import importlib
import importlib.util
import typing
from collections.abc import Callable, Collection, Sequence
from types import UnionType
from typing import Any

from tformer_jax.base.errors import UserError

annotated_types: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Returns the annotated types of a class by attribute; evaluating them takes as long as all checks of a config."""


def type_with_article(value: object) -> str:
    """Returns the type of a value as a sentence names it, such as "a list", "an int" or "None"."""
    name = type(value).__name__
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def check_type(name: str, value: object, expected: type | tuple[type, ...] | UnionType, instead: str) -> None:
    """Raises `UserError` if the argument `name` has another type than `expected`; `instead` says what to pass."""
    if not isinstance(value, expected):
        raise UserError(f"{name} is {type_with_article(value)}: pass {instead}")


def plain_value_hint(value: Any, choices: Collection[str] | None) -> str:
    """Returns a hint what to write for a setting in place of a value of NumPy, JAX or Optax; "" for others."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return f"; write {value.item()!r}"
    if (name := getattr(value, "__name__", getattr(value, "name", None))) in (choices or ()):
        return f"; write {name!r}"
    transforms = hasattr(value, "init") and hasattr(value, "update")
    return "; pass a transformation of Optax to tj.train as optimizer=" if transforms else ""


def require(what: str, modules: Sequence[str], extra: str) -> None:
    """Raises `UserError`, which begins with `what`, if a module of an extra is not installed."""
    if missing := not_installed(modules):
        raise UserError(f'{what} needs {" and ".join(missing)}: pip install -e ".[{extra}]"')


def require_pages(what: str) -> None:
    """Raises `UserError`, which begins with `what`, if a package for pages of the report is not installed."""
    require(what, ("jinja2", "plotly"), "report")


def import_extra(what: str, module: str, extra: str) -> Any:
    """Imports a module of an extra; arguments and exceptions are as for `require`."""
    require(what, (module,), extra)
    return importlib.import_module(module)


def not_installed(modules: Sequence[str]) -> list[str]:
    """Returns the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]
