"""Runs config files; each mistake in them is reported in one sentence."""

import contextlib
import importlib.machinery
import inspect
import re
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tformer_jax.config import ConfigError


def run(path: Path, variant: Sequence[str]) -> ConfigDict:
    """Returns the result of `get_config` in a config file.

    Args:
        variant: the arguments of `get_config`: the name of a variant, or none.

    Raises:
        ConfigError: the file raises it, or has a mistake.
    """
    loader = importlib.machinery.SourceFileLoader("config_file", str(path))
    module = types.ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # where the decorator of a dataclass in the file looks for it
    with mistakes(path):
        loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ConfigError(f"{path} has no function get_config, which returns to_config_dict(Config(...))")
    try:
        inspect.signature(get_config).bind(*variant)
    except TypeError:
        problem = "has no variants: leave out the colon" if variant else "needs a variant after a colon"
        raise ConfigError(f"{path} {problem}") from None
    with mistakes(path):
        found = get_config(*variant)
    if not isinstance(found, ConfigDict):
        returned = type(found).__name__
        raise ConfigError(f"{path}: get_config must return to_config_dict(Config(...)), a ConfigDict, not {returned}")
    return found


@contextlib.contextmanager
def mistakes(path: Path) -> Iterator[None]:
    """Context manager that reports an exception in a config file as a `ConfigError` with its line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if hint := re.search(r'Did you mean "(.+?)" instead of "(.+?)"', str(error)):
            raise ConfigError(f"{path}: unknown setting {hint[2]!r}; did you mean {hint[1]!r}?") from error
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        text = str(error)
        if isinstance(error, SyntaxError):
            lines, text = [error.lineno], error.msg
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        reason = " ".join(text.partition(". Other fields present")[0].split())  # of a locked ConfigDict
        raise ConfigError(f"{where}: {type(error).__name__}: {reason}") from error
