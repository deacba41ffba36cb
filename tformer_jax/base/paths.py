"""Paths of run folders, local or `gs://BUCKET/FOLDER` in Google Cloud Storage by etils' `epath`; values for JSON.

A bucket has no locks, no append and no atomic rename of folders; each object is written atomically.
"""

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tformer_jax.base import checks
from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError


def as_path(location: str | Path) -> Path:
    """Returns the path of a run folder; for `gs://`, an `epath.Path`, which has most methods of `Path`.

    A local path such as `.` or `..`, which lacks the folder's name, is resolved: the names of locks and temporary
    folders beside a run include it. A leading `~` is the home folder.

    Raises:
        UserError: it is no path, the URL has another scheme, or gcsfs is not installed.
    """
    if not isinstance(location, str) or "://" not in location:
        check_type("the run folder", location, (str, os.PathLike), "its path, such as 'runs/NAME'")
        path = home_expanded(Path(location) if isinstance(location, str) else location)
        return resolved(path) if path.name in ("", "..") else path
    if not location.startswith("gs://"):
        raise UserError(f"{location} is not supported: a run folder is a local folder or gs://BUCKET/FOLDER")
    checks.require(location, ("gcsfs",), "gcs")
    from etils import epath  # local paths do not need it

    return cast(Path, epath.Path(location))


def home_expanded(path: Path) -> Path:
    """Returns a path with the home folder in place of a leading `~`; a path in a bucket is unchanged.

    Raises:
        UserError: there is no such home folder.
    """
    try:
        return path if is_remote(path) else path.expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error} Write the whole path.") from error


def is_remote(path: Path) -> bool:
    """Returns whether the path is in a bucket."""
    return not isinstance(path, Path)


def resolved(path: Path) -> Path:
    """Returns `path.resolve()`; a path in a bucket is unchanged, since `epath` adds the working directory to it.

    Raises:
        UserError: symbolic links form a loop.
    """
    if is_remote(path):
        return path
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()  # since Python 3.13, `resolve` ignores a loop
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be resolved ({error}): name another path") from error


def check_replaceable(path: Path) -> None:
    """Raises `UserError` if a folder contains the working directory, which would be removed with it."""
    if not is_remote(path) and Path.cwd().is_relative_to(resolved(path)):
        raise UserError(f"{path} contains the working directory, which would be replaced: choose another folder")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside `path`; the file written there replaces `path`, or is removed if the block fails.

    If `path` is a symbolic link, its target is replaced. If it is a device or a pipe, `path` itself is yielded.
    """
    path = resolved(path)
    if path.exists() and not path.is_file():
        yield path
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write to a full disk does not name the file
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path` that replaces it, or is removed if the block fails; in a bucket, `path`.

    If `path` is a symbolic link, its target is replaced. A folder that contains the working directory cannot be
    replaced (`UserError`).
    """
    if is_remote(path):
        remote: Any = path
        remote.rmtree(missing_ok=True)
        path.mkdir(parents=True)
        yield path
        return
    check_replaceable(path)
    folder = resolved(path)
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    for leftover in filter(Path.exists, (partial, old)):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically; locally, by renaming."""
    if is_remote(path):
        path.write_bytes(text.encode())
        return
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def append_lines(path: Path, lines: str) -> None:
    """Appends to a UTF-8 file, after the end of an incomplete last line; in a bucket, by writing it again."""
    if is_remote(path):
        path.write_bytes((path.read_bytes() if path.exists() else b"") + lines.encode())
        return
    with path.open("ab+") as file:
        file.seek(-min(file.tell(), 1), os.SEEK_END)
        incomplete = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * incomplete + lines.encode())


def checksum(path: Path) -> str:
    """Returns the SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite(value: Any) -> Any:
    """Returns a value for JSON, with None for non-finite numbers."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
