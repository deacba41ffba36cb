"""Input texts of a command: the command line, standard input, or a file of lines or JSON objects."""

import hashlib
import itertools
import json
import logging
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import checksum
from tformer_jax.data.corpora.lines import (
    COMPRESSIONS,
    NOT_A_CHARACTER,
    BadLines,
    decoded_lines,
    is_unicode,
    open_binary,
)

JSONL = tuple(f".jsonl{end}" for end in ("", *COMPRESSIONS))
Fields = Mapping[str, str]
"""JSON field of each text of a line, by the flag that sets it."""
CONSTRAINTS = "--constraints-field"
"""Flag of a field that may have any value."""
OPTIONAL = ("--to-field", "--from-field", "--prefix-field", CONSTRAINTS)
"""Flags of fields that a JSON object need not have; their texts are then empty."""


class Line(NamedTuple):
    """One line of input."""

    texts: tuple[str, ...]
    """One per entry of `Fields`."""
    record: dict[str, Any]
    """JSON object with these texts."""


class Source:
    """Input lines, read only as needed.

    Raises:
        UserError: the input does not exist, or there is a file in addition to texts.
    """

    def __init__(self, texts: Sequence[str], path: Path | None):
        if texts and path:
            raise UserError("give texts on the command line or with --input, not both")
        if path is not None and not path.exists():
            raise UserError(f"{path} does not exist")
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder: name a file with --input")
        if not texts and path is None and sys.stdin is None:
            raise UserError("standard input is closed: give texts or --input FILE")
        self._texts, self._path = [check_argument(text) for text in texts], path
        self._file: BinaryIO | None = None

    @property
    def is_file(self) -> bool:
        """Whether the input is a file, which can be read again."""
        return self._path is not None and self._path.is_file()

    @property
    def size(self) -> int | None:
        """The size of the file in bytes; None if it is unknown."""
        if self._path is None or not self.is_file or self._path.suffix in COMPRESSIONS.keys() - {".gz"}:
            return None
        return self._path.stat().st_size

    @property
    def position(self) -> int:
        """The number of bytes of the file that have been read; 0 if its size is unknown."""
        return 0 if self._file is None or self.size is None else getattr(self._file, "fileobj", self._file).tell()

    def identity(self, lines: int | None = None) -> dict[str, Any]:
        """Returns facts that identify a file, or its first `lines` lines; empty if the input is not a file."""
        if self._path is None or not self.is_file:
            return {}
        if lines is not None:
            digest = hashlib.sha256()
            for _, text in itertools.islice(self._numbered(), lines):
                digest.update(f"{text}\n".encode())
            return {"name": self._path.name, "lines": lines, "sha256": digest.hexdigest()}
        try:
            return {"name": self._path.name, "bytes": self._path.stat().st_size, "sha256": checksum(self._path)}
        except OSError as error:
            raise UserError(f"{self._path} cannot be read: {error.strerror}") from error

    def location(self, index: int) -> str:
        """Returns the location of line `index`, from 0, for messages."""
        return f"text {index + 1}" if self._texts else f"{self._name}, line {index + 1}"

    def lines(self, fields: Fields, reserved: Collection[str] = ()) -> Iterator[Line]:
        """Yields the lines: texts, JSON objects, or tab-separated texts if there are several `fields`.

        Args:
            reserved: fields that no JSON object may have.

        Raises:
            UserError: the file cannot be opened, is empty or damaged, or a line is not UTF-8 or is malformed.
        """
        records = self._path is not None and self._path.name.endswith(JSONL)
        read = read_record if records else read_columns
        absent = {flag: field for flag, field in fields.items() if records and flag in OPTIONAL}
        for number, text in self._numbered():
            try:
                line = read(text, fields)
                if taken := [name for name in reserved if name in line.record]:
                    problem = "a name that the output uses: rename the field, or write text, not .jsonl"
                    raise ValueError(f"has a field {taken[0]!r}, {problem}")
                absent = {flag: field for flag, field in absent.items() if line.record.get(field) is None}
                yield line
            except ValueError as error:
                raise UserError(f"{self.location(number - 1)}: {error}") from None
        for flag, field in absent.items():
            logging.getLogger(__name__).warning(
                "no line of %s has the field %r, which %s names", self._path, field, flag
            )

    @property
    def _name(self) -> str:
        return "standard input" if self._path is None else str(self._path)

    def _numbered(self) -> Iterator[tuple[int, str]]:
        if self._texts:
            yield from enumerate(self._texts, start=1)
            return
        self._file = sys.stdin.buffer if self._path is None else open_binary(self._path)
        number = 0
        for number, line in decoded_lines(self._file, Path(self._name), BadLines()):
            assert line is not None
            yield number, line
        if self._path is not None and not number:
            raise UserError(f"{self._path} is empty")


def read_columns(text: str, fields: Fields) -> Line:
    """Splits a line at tabs into one text per field; with a single field, the whole line is the text.

    Raises:
        ValueError: the number of columns does not match `fields`.
    """
    texts = text.split("\t") if len(fields) > 1 else [text]
    if len(texts) != len(fields):
        raise ValueError(
            f"has {len(texts)} column{'s' * (len(texts) != 1)} where {'<tab>'.join(fields.values())} is expected"
        )
    return Line(tuple(texts), dict(zip(fields.values(), texts, strict=True)))


def read_record(text: str, fields: Fields) -> Line:
    """Parses a JSON object with a text in each field.

    Raises:
        ValueError: the line has another format.
    """
    if not text.strip():
        raise ValueError("is blank: remove it")
    try:
        record = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    texts = []
    for flag, field in fields.items():
        read = value_in if flag == CONSTRAINTS else text_in
        texts.append("" if flag in OPTIONAL and record.get(field) is None else read(record, flag, field))
    return Line(tuple(texts), record)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite 64-bit number")
    return number


def text_in(record: Mapping[str, Any], flag: str, field: str) -> str:
    """Returns the text in a field of a record, which `flag` names.

    Raises:
        ValueError: there is no such field, or it is not a text.
    """
    return check_text(value_in(record, flag, field), field)


def value_in(record: Mapping[str, Any], flag: str, field: str) -> Any:
    """As `text_in`, for a value of any type."""
    if field not in record:
        if not record:
            raise ValueError("has no fields")
        chats = ", or generate and score conversations with --chat" if {"messages", "conversations"} & {*record} else ""
        raise ValueError(
            f"has no field {field!r}, only {', '.join(map(repr, record))}: name another with {flag}{chats}"
        )
    return record[field]


def check_text(text: Any, field: str) -> str:
    """Returns the value `text` of a field.

    Raises:
        ValueError: it is not a text.
    """
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is {type(text).__name__}, not text")
    if not is_unicode(text):
        raise ValueError(f"field {field!r} {NOT_A_CHARACTER}")
    return text


def check_argument(text: str) -> str:
    """Returns `text` if it is valid.

    Raises:
        UserError: the shell passed bytes that are not UTF-8.
    """
    if not is_unicode(text):
        raise UserError("a text on the command line is not valid UTF-8")
    return text
