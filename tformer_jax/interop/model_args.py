"""Sizes of the models of state dicts: most are those of the arrays, the others are given as "model_args"."""

import re

from tformer_jax.base.errors import UserError
from tformer_jax.interop.architecture import Settings
from tformer_jax.interop.files import StoredArrays

REQUIRED = None
"""Default of an argument that must be given."""


def checked(given: Settings, arrays: Settings, defaults: Settings) -> Settings:
    """Returns the given arguments, with defaults.

    Args:
        arrays: arguments that the arrays determine, which may be given as well.

    Raises:
        UserError: an argument is unknown or missing, or contradicts the arrays.
    """
    for name, value in given.items():
        if name not in arrays and name not in defaults:
            known = ", ".join([*arrays, *defaults])
            raise UserError(f"model_args: {name}={value!r} is not supported; supported are {known}")
        if name in arrays and arrays[name] != value:
            raise UserError(f"model_args: {name}={value!r}, but the arrays have {arrays[name]!r}")
    found = defaults | given
    for name, default in defaults.items():
        if default is REQUIRED and found[name] is REQUIRED:
            raise UserError(
                f"model_args: {name} is missing and cannot be inferred from the arrays: add --model-args {name}=..."
            )
    return found


def shape(arrays: StoredArrays, name: str) -> tuple[int, ...]:
    """Returns the shape of a matrix."""
    if name not in arrays:
        raise UserError(f"the checkpoint has no {name!r}")
    found: tuple[int, ...] = arrays[name].shape
    if len(found) != 2:
        raise UserError(f"{name} of the checkpoint has the shape {found}, but must be a matrix")
    return found


def depth(arrays: StoredArrays, pattern: str) -> int:
    """Returns the number of layers, given a pattern of names whose group is the number of a layer."""
    return 1 + max((int(found[1]) for name in arrays if (found := re.match(pattern, name))), default=-1)
