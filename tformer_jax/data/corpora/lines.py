"""Lines of text files, plain or compressed, and what becomes of those that cannot be read."""

import collections
import contextlib
import gzip
import io
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from tformer_jax.data.corpora.corpus import DataError

DAMAGED = (OSError, EOFError, zlib.error, pa.ArrowException)
"""What reading a damaged or shortened compressed file raises."""


class BadLines:
    """Stops at the first line that cannot be read, or skips and counts such lines."""

    def __init__(self, *, skip: bool = False):
        self._skip = skip
        self._counts: dict[Path, collections.Counter[str]] = {}
        self._first: dict[tuple[Path, str], int] = {}

    def start(self, path: Path) -> None:
        """Forgets what was counted in a file that is read once more."""
        self._counts[path] = collections.Counter()

    def found(self, path: Path, line: int, problem: str) -> None:
        """Takes note of a line that cannot be read.

        Raises:
            DataError: bad lines are not skipped.
        """
        if not self._skip:
            raise DataError(f"{path}, line {line}: {problem}")
        self._counts[path][problem] += 1
        self._first.setdefault((path, problem), line)

    def reasons(self) -> dict[str, int]:
        """How many lines were skipped, by what was wrong with them."""
        return dict(sum(self._counts.values(), start=collections.Counter()))

    def report(self) -> None:
        """Logs what was skipped, a line a file and reason."""
        for path, counts in self._counts.items():
            for problem, count in counts.items():
                logging.getLogger(__name__).warning(
                    "%s: skipped %d lines, the first is line %d: %s", path, count, self._first[path, problem], problem
                )


def numbered_lines(path: Path, bad: BadLines, *, keep_ends: bool = False) -> Iterator[tuple[int, str | None]]:
    """The lines of a file, from 1, without their line ends unless `keep_ends`; None stands for one that is skipped.

    `.gz` and `.zst` files are decompressed as they are read.

    Raises:
        DataError: the file is empty; or, where bad lines are not skipped, it is damaged or not UTF-8.
    """
    blank = True
    with contextlib.closing(open_binary(path)) as file:
        for number, line in decoded_lines(file, path, bad, keep_ends=keep_ends):
            blank = blank and line is not None and not line.strip()
            yield number, line
    if blank:
        raise DataError(f"{path} is empty")


def decoded_lines(
    file: BinaryIO, path: Path, bad: BadLines, *, keep_ends: bool = False
) -> Iterator[tuple[int, str | None]]:
    """As `numbered_lines`, of an open file, which may be empty; `path` is its name in messages."""
    bad.start(path)
    for number, raw in enumerate(_raw_lines(file, path, bad), start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            bad.found(path, number, "not valid UTF-8; convert the file to UTF-8")
            yield number, None
        else:
            yield number, line if keep_ends else line.removesuffix("\n").removesuffix("\r")


def read_text(path: Path, bad: BadLines) -> str:
    """A whole file as text, without the lines that are skipped."""
    return "".join(line for _, line in numbered_lines(path, bad, keep_ends=True) if line is not None)


def open_binary(path: Path) -> BinaryIO:
    """The bytes of a file; those of `.gz` and `.zst` files are decompressed as they are read."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".zst":
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _raw_lines(file: BinaryIO, path: Path, bad: BadLines) -> Iterator[bytes]:
    number = 0
    while True:
        try:
            raw = file.readline()
        except DAMAGED as error:
            kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix, "readable")
            bad.found(path, number + 1, f"from here on, this is not a complete {kind} file ({error})")
            return
        if not raw:
            return
        number += 1
        yield raw
