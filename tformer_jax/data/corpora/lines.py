"""Reads lines of plain or compressed text files and handles malformed lines."""

import bz2
import collections
import contextlib
import gzip
import io
import itertools
import logging
import lzma
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from tformer_jax.data.corpora.example import DataError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4", ".zst": "zstd"}
"""Compressions of files, by the ends of their names."""
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions raised by a damaged or truncated compressed file."""
CHUNK = 1 << 16
"""Number of bytes that are read at once."""
PARQUET = b"PAR1"
"""The first bytes of Parquet files."""
IS_PARQUET = "this is a Parquet file, which data.source='parquet' reads"
NOT_UTF8 = f"not valid UTF-8: convert the file to UTF-8; a compressed one must be named {' or '.join(COMPRESSIONS)}"
NOT_A_CHARACTER = "has a lone surrogate, which is not a character"


class BadLines:
    """Raises at the first malformed line, or with `skip`, counts malformed lines.

    `setting` names, for the message, the setting that skips malformed lines; "" if there is none.
    """

    def __init__(self, *, skip: bool = False, setting: str = ""):
        self._skip, self._advice = skip, f"; {setting} skips malformed lines and files" if setting else ""
        self._counts: dict[Path, collections.Counter[str]] = {}
        self._first: dict[tuple[Path, str], int] = {}

    def start(self, path: Path) -> None:
        """Resets the counts of a file before it is read again."""
        self._counts[path] = collections.Counter()

    def reject(self, path: Path, line: int, problem: str, count: int = 1) -> None:
        """Raises an error for malformed lines or rows, or counts them if they are skipped.

        Args:
            line: number of the first of the `count` lines, from 1.

        Raises:
            DataError: malformed lines are not skipped.
        """
        if not self._skip:
            raise DataError(f"{path}, line {line}: {problem}{self._advice}")
        self._counts[path][problem] += count
        self._first.setdefault((path, problem), line)

    def reject_empty(self, path: Path) -> None:
        """Raises an error for an empty file, or counts it as a malformed line, unless its first line is one.

        Raises:
            DataError: malformed lines are not skipped.
        """
        if not self._skip:
            raise DataError(f"{path} is empty{self._advice}")
        if not self._counts.get(path):
            self.reject(path, 1, "the file is empty")

    def facts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Returns by file and reason the number of skipped lines and the number of the first one, ready for JSON."""
        return {
            str(path): {problem: (count, self._first[path, problem]) for problem, count in counts.items()}
            for path, counts in self._counts.items()
        }

    def restore(self, facts: dict[str, dict[str, tuple[int, int]]]) -> None:
        """Takes the `facts` of an earlier reading of some files."""
        for path, problems in facts.items():
            self._counts[Path(path)] = collections.Counter({problem: count for problem, (count, _) in problems.items()})
            self._first |= {(Path(path), problem): line for problem, (_, line) in problems.items()}

    def reasons(self) -> dict[str, int]:
        """Returns the number of skipped lines by reason."""
        return dict(sum(self._counts.values(), start=collections.Counter()))

    def explanation(self) -> str:
        """Returns the number of skipped lines and the most frequent reason, to end a message with; "" if none were."""
        reasons = self.reasons()
        if not reasons:
            return ""
        problem = max(reasons, key=lambda name: reasons[name])
        return f"; malformed lines skipped: {sum(reasons.values()):,}, {reasons[problem]:,} of them: {problem}"

    def report(self) -> None:
        """Logs the number of skipped lines per file and reason."""
        for path, counts in self._counts.items():
            for problem, count in counts.items():
                logging.getLogger(__name__).warning(
                    "%s: malformed lines skipped: %s, the first at line %d: %s",
                    path,
                    f"{count:,}",
                    self._first[path, problem],
                    problem,
                )


def numbered_lines(path: Path, bad: BadLines, *, keep_ends: bool = False) -> Iterator[tuple[int, str | None]]:
    """Yields numbered lines of a file, from 1, without line ends unless `keep_ends`; None for skipped lines.

    Files with a name in `COMPRESSIONS` are decompressed as they are read.

    Raises:
        DataError: the file cannot be opened; or it is empty, damaged or not UTF-8, and malformed lines are not skipped.
    """
    with contextlib.closing(open_binary(path)) as file:
        lines = decoded_lines(file, path, bad, keep_ends=keep_ends)
        for number, line in lines:
            yield number, line
            if line is None or line.strip():
                yield from lines
                return
    bad.reject_empty(path)


def decoded_lines(
    file: BinaryIO, path: Path, bad: BadLines, *, keep_ends: bool = False
) -> Iterator[tuple[int, str | None]]:
    """Like `numbered_lines`, for an open file, which may be empty; `path` is its name in messages."""
    return decode_lines(raw_lines(file, path, bad), path, bad, keep_ends=keep_ends)


def raw_lines(file: BinaryIO, path: Path, bad: BadLines) -> Iterator[bytes]:
    """Yields the lines of an open file; raises `DataError` if it is damaged and malformed lines are not skipped."""
    bad.start(path)
    numbers = itertools.count(1)
    try:
        yield from map(operator.itemgetter(0), zip(file, numbers, strict=False))  # a loop takes twice the time
    except DAMAGED as error:
        kind = COMPRESSIONS.get(path.suffix, "readable")
        bad.reject(path, next(numbers), f"from here on, this is not a complete {kind} file ({error})")


def decode_lines(
    lines: Iterable[bytes], path: Path, bad: BadLines, *, first: int = 1, keep_ends: bool = False
) -> Iterator[tuple[int, str | None]]:
    """Yields lines as text, with their numbers from `first` on; None for skipped ones."""
    for number, raw in enumerate(lines, start=first):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            bad.reject(path, number, IS_PARQUET if raw.startswith(PARQUET) else NOT_UTF8)
            yield number, None
        else:
            yield number, line if keep_ends else line.removesuffix("\n").removesuffix("\r")


class _Streams(io.RawIOBase):
    """Decompresses a file of one or more streams, with zeros as padding.

    The library's files end without an error where another stream should begin, and omit the rest.
    """

    def __init__(self, path: Path, decompressor: Callable[[], Any]):
        self._file, self._new, self._stream = path.open("rb"), decompressor, decompressor()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            compressed = b""
            if self._stream.eof:
                compressed = self._next_stream()
                if not compressed:
                    return 0
                self._stream = self._new()
            elif self._stream.needs_input:
                compressed = self._file.read(CHUNK)
                if not compressed:
                    raise EOFError("its last stream has no end")
            data = self._stream.decompress(compressed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next_stream(self) -> bytes:
        """Returns the first bytes after the padding that follows a stream; empty at the end of the file."""
        compressed = self._stream.unused_data.lstrip(b"\0")
        while not compressed and (read := self._file.read(CHUNK)):
            compressed = read.lstrip(b"\0")
        return compressed


def read_text(path: Path, bad: BadLines) -> str:
    """Reads a file as one string, without skipped lines."""
    return "".join(line for _, line in numbered_lines(path, bad, keep_ends=True) if line is not None)


def is_unicode(text: str) -> bool:
    """Returns whether `text` can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_binary(path: Path) -> BinaryIO:
    """Opens a file for reading bytes, which are decompressed if `COMPRESSIONS` has the end of its name.

    Raises:
        DataError: the file cannot be opened.
    """
    try:
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path))
        if decompressor := {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}.get(path.suffix):
            return io.BufferedReader(_Streams(path, decompressor), CHUNK)
        if path.suffix in COMPRESSIONS:
            import pyarrow as pa  # not needed by most commands, and a fifth of the time of their --help

            return io.BufferedReader(pa.input_stream(str(path), compression=COMPRESSIONS[path.suffix]))
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
