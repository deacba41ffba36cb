"""Reads the JSON files of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.lfs_pointers import check_fetched

Settings = dict[str, Any]


def read_json(path: Path, default: Settings | None = None) -> Settings:
    """Reads a JSON object.

    Raises:
        UserError: the file is damaged or not fetched, or is missing and there is no default.
    """
    if default is not None and not path.is_file():
        return default
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except ValueError as error:
        check_fetched(path)
        raise UserError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object")
    return values
