"""Packages that only some commands and settings need; the extras of pyproject.toml install them."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from tformer_jax.base.errors import UserError


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
