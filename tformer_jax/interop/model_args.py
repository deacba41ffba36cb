"""Sizes of the models of state dicts, which the arrays determine or "model_args" gives."""

import re

from tformer_jax.base.errors import UserError
from tformer_jax.interop.architecture import Settings
from tformer_jax.interop.files import StoredArrays

REQUIRED = None
"""Default of an argument that must be given."""


def check_arguments(given: Settings, arrays: Settings, defaults: Settings) -> Settings:
    """Returns the given arguments, with defaults.

    Args:
        arrays: arguments that the arrays determine, which may be given as well.

    Raises:
        UserError: an argument is unknown or missing, or contradicts the arrays.
    """
    for name, value in given.items():
        if name not in arrays and name not in defaults:
            supported = ", ".join([*arrays, *defaults])
            raise UserError(f"model_args: {name}={value!r} is not supported; supported are {supported}")
        if name in arrays and arrays[name] != value:
            raise UserError(f"model_args: {name}={value!r}, but the arrays have {arrays[name]!r}")
    values = defaults | given
    for name, default in defaults.items():
        if default is REQUIRED and values[name] is REQUIRED:
            raise UserError(
                f"model_args: {name} is missing and cannot be inferred from the arrays: add --model-args {name}=..."
            )
    return values


def matrix_shape(arrays: StoredArrays, name: str) -> tuple[int, ...]:
    """Returns the shape of a matrix."""
    if name not in arrays:
        raise UserError(f"the checkpoint has no {name!r}")
    sizes: tuple[int, ...] = arrays[name].shape
    if len(sizes) != 2:
        raise UserError(f"{name} of the checkpoint has the shape {sizes}, but must be a matrix")
    return sizes


def count_layers(arrays: StoredArrays, pattern: str) -> int:
    """Returns the number of layers, given a pattern of names whose group is the number of a layer."""
    return 1 + max((int(match[1]) for name in arrays if (match := re.match(pattern, name))), default=-1)
