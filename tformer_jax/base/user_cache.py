"""Caches values in the user's cache folder, for later commands; each of them can be computed again."""

import contextlib
import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "TFORMER_CACHE_DIR"
"""Environment variable with the folder; if it is unset or empty, nothing is cached."""
MAX_FILES = 64
"""Maximum number of files per topic; the least recently used ones are removed."""


def default_folder() -> Path:
    """Returns the folder `tformer_jax` in the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        caches = named if named.is_absolute() else Path.home() / ".cache"
    return caches / "tformer_jax"


def cached(topic: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Returns `make()`, or the cached result of an earlier call with an equal key, by this process or another.

    A damaged file, or one of another key, is replaced; a folder that cannot be written is not used.

    Args:
        topic: the subfolder.
        key: everything that the value depends on, versions included; JSON-serializable.
        make: returns a value that JSON preserves: without tuples and with only strings as keys.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        return make()
    named = json.dumps(key, sort_keys=True)
    path = Path(root) / topic / f"{_digest(named)[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return _read(path, named)
    value = make()
    with contextlib.suppress(OSError):
        _write(path, named, value)
    return value


def source_digest(*modules: ModuleType) -> str:
    """Returns a hash of the source code of modules, and of all files of packages, for the key of what they compute."""
    return _digest("".join(map(_source, modules)))


def _source(module: ModuleType) -> str:
    files = (file for folder in getattr(module, "__path__", ()) for file in sorted(Path(folder).glob("*.py")))
    return "".join(file.read_text(encoding="utf-8") for file in files) or inspect.getsource(module)


def _read(path: Path, key: str) -> Any:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["key"] != key or content["sha256"] != _digest(content["value"]):
        raise ValueError(f"{path} is not what was written")
    os.utime(path)
    return json.loads(content["value"])


def _write(path: Path, key: str, value: Any) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(value)
    content = {"key": key, "sha256": _digest(text), "value": text}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8") as file:
        new = Path(file.name)
        try:
            json.dump(content, file)
            file.flush()
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    for old in sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-MAX_FILES]:
        old.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
