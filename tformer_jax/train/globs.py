"""Globs of parameter names in settings."""

import fnmatch
import re
from collections.abc import Sequence

from tformer_jax.config.fields import Section

SCANNED = re.compile("/periods/layers_[0-9]+/")
"""Part of the names of parameters that hold those of several layers (`nn.stacks.Stack`)."""


def match(section: Section, setting: str, glob: str, names: Sequence[str]) -> list[str]:
    """Returns the names of parameters that a glob of a setting matches.

    Raises:
        ConfigError: it matches none, or would match only some of the layers of a scan, which have common parameters.
    """
    for name in filter(SCANNED.search, () if "periods" in glob else names):
        stack = name.partition("/")[0]
        others = {number for other in names for number in re.findall(f"^{stack}/layers_([0-9]+)/", other)}
        numbers = {*re.findall("[0-9]+", glob), "0", "1", "10", "100"} - others
        written = [SCANNED.sub(f"{place}/layers_{number}/", name) for number in numbers for place in ("/periods", "")]
        if len({fnmatch.fnmatch(one, glob) for one in written}) > 1:
            raise section.error(
                setting,
                f"{glob!r} depends on the layer, but {name!r} holds the parameters of several (model.scan_layers=True);"
                " set model.scan_layers=False, or write periods/layers_ in the glob to match all of them",
            )
    found = fnmatch.filter(names, glob)
    if not found:
        raise section.error(setting, f"{glob!r} matches no parameter name, such as {names[0]!r}")
    return found
