"""Types of attributes, and checks of the types of arguments, each reported in a sentence that says what to pass."""

import functools
import typing
from collections.abc import Callable, Collection
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


def check_type(name: str, value: object, expected: type | tuple[type, ...], instead: str) -> None:
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
