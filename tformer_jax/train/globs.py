"""Globs of parameter names in settings."""

import fnmatch
import re
from collections.abc import Sequence

from tformer_jax.config.fields import Section

LAYER = re.compile(r"layers_[\d?[]")


def match(section: Section, setting: str, glob: str, names: Sequence[str]) -> list[str]:
    """Returns the names of parameters that a glob of a setting matches.

    Raises:
        ConfigError: it matches none, or names a layer by its number and matches layers of a scan, which have no
            parameters of their own.
    """
    found = fnmatch.filter(names, glob)
    if not found:
        raise section.error(setting, f"{glob!r} matches no parameter name, such as {names[0]!r}")
    scanned = [name for name in found if "/periods/" in name]
    if scanned and LAYER.search(glob) and "periods" not in glob:
        raise section.error(
            setting,
            f"{glob!r} names a layer, but {scanned[0]!r} holds the parameters of several (model.scan_layers=True); "
            "set model.scan_layers=False, or write periods/layers_ in the glob to match all of them",
        )
    return found
