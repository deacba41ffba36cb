"""The tables of `published.toml`: fields of published configs, their defaults and other names."""

import itertools
import tomllib
from importlib import resources
from typing import Any

_TABLES = tomllib.loads((resources.files("tformer_jax.interop") / "published.toml").read_text(encoding="utf-8"))
_NOT_FIELDS = ("like", "unread", "aliases")


def _extended(table: dict[str, Any]) -> dict[str, Any]:
    """Returns a table with the entries of the tables in its field `like`."""
    result: dict[str, Any] = {"unread": [], "aliases": {}}
    for part in (*(_extended(_TABLES["bases"][name]) for name in table.get("like", ())), table):
        unread, aliases = (result[name] for name in ("unread", "aliases"))
        result |= part | {"unread": unread + part.get("unread", []), "aliases": aliases | part.get("aliases", {})}
    return result


_TYPES = {kind: _extended(table) for kind, table in _TABLES["types"].items()}
DEFAULTS: dict[str, dict[str, Any]] = {
    kind: {name: value for name, value in table.items() if name not in _NOT_FIELDS} for kind, table in _TYPES.items()
}
"""Defaults by `model_type`, of the settings that this package reads."""
UNREAD = frozenset(itertools.chain(*_TABLES["unread"].values()))
"""Fields that change the logits of no model: they are about files, tokens, generation, training and other heads."""
UNREAD_BY: dict[str, list[str]] = {kind: table["unread"] for kind, table in _TYPES.items()}
"""Fields that transformers does not read for a `model_type`, or not with the fields that this package requires."""
ALIASES: dict[str, dict[str, str]] = {kind: table["aliases"] for kind, table in _TYPES.items()}
"""Other names of fields by `model_type`."""
UNSUPPORTED: dict[str, list[str]] = _TABLES["unsupported"]
"""By `model_type` that is not supported: what no supported one has, and the nearest supported one."""
