"""Records with named fields or columns: TSV and JSON lines, compressed or not."""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_jax.config import DataConfig
from tformer_jax.config.directions import Direction
from tformer_jax.config.fields import separated
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.data.corpora.chats import read_chat
from tformer_jax.data.corpora.corpus import CHATS, LABELED, PAIRS, DataError, Example
from tformer_jax.data.corpora.directions import direction_of, fill
from tformer_jax.data.corpora.example import type_name
from tformer_jax.data.corpora.files import FileSource, LineSource
from tformer_jax.data.corpora.lines import NOT_A_CHARACTER, BadLines, is_unicode, numbered_lines

if TYPE_CHECKING:
    from tformer_jax.data.corpora.blocks import Block

LANGUAGES = ("source_language", "target_language")
"""Keys of the languages of a pair, until it has its direction."""


class Tsv(LineSource):
    """Tab-separated columns, without quotes: source and target, or label and text; blank lines are no examples.

    With `data.fields`, all lines of a file have as many columns as its first one: a tab within a text cuts none.
    """

    settings = (*FileSource.settings, "fields", "language_fields", "header")
    examples = (PAIRS, LABELED)
    entry = "'train.tsv'"

    def read_file_blocks(self, path: Path) -> Iterator["Block"]:
        from tformer_jax.data.corpora.blocks import as_block, split_columns, split_lines

        columns = self._columns(path)
        width = self._width(path, columns) if self.cfg.fields else len(columns)
        are_pairs = (*columns,) == PAIRS
        for first, (block,) in self.line_blocks(path):
            texts = split_columns(split_lines(block), width, columns.values()) if are_pairs else [None]
            yield as_block(PAIRS, texts) or self._examples(path, first, block, width, columns)

    def _examples(
        self, path: Path, first: int, block: Sequence[bytes], width: int, columns: dict[str, int]
    ) -> Iterator[Example]:
        for number, line in self.filled(self.decode(path, first, block)):
            cells = line.split("\t")
            if len(cells) != width:
                named = f"{width} columns are" if self.cfg.fields else f"{'<tab>'.join(columns)} is"
                self.bad.reject(
                    path, number, f"has {len(cells)} column{'s' * (len(cells) != 1)} where {named} expected"
                )
                continue
            try:
                yield with_direction({key: cells[column] for key, column in columns.items()})
            except DataError as error:
                self.bad.reject(path, number, str(error))

    def _width(self, path: Path, columns: dict[str, int]) -> int:
        """Returns the number of columns of the first line, and at least as many as are read."""
        lines = numbered_lines(path, BadLines(skip=True))
        lines = itertools.islice(lines, int(self.cfg.header), None)
        first = next((line for _, line in lines if line and line.strip()), "")
        return max(first.count("\t") + 1, *(column + 1 for column in columns.values()))

    def _columns(self, path: Path) -> dict[str, int]:
        """Maps keys to columns, from 0, which settings name by numbers or by the names in a header."""
        cfg = self.cfg
        if cfg.language_fields and not cfg.fields:
            raise cfg.error("fields", "must name the columns of source and target beside data.language_fields")
        if not cfg.fields:
            return dict(zip(self.keys if "source" in self.keys else reversed(self.keys), (0, 1), strict=True))
        fields = field_names(cfg, self.keys, *self.directions)
        if all(field.isdecimal() and field != "0" for field in fields.values()):
            return {key: int(field) - 1 for key, field in fields.items()}
        if not cfg.header:
            raise cfg.error(
                "fields", "must be column numbers, such as ('1', '2'), for data.source='tsv' without data.header"
            )
        first = next(numbered_lines(path, self.bad), None)
        if first is None:  # the file is empty
            return dict.fromkeys(fields, 0)
        names = (first[1] or "").split("\t")
        if missing := [field for field in fields.values() if field not in names]:
            setting = "language_fields" if missing[0] in cfg.language_fields else "fields"
            raise DataError(
                f"{path} has no column {missing[0]!r}, only {', '.join(map(repr, names))}: set data.{setting}"
            )
        if twice := [field for field in fields.values() if names.count(field) > 1]:
            raise DataError(f"{path} names two columns {twice[0]!r}: rename one of them")
        return {key: names.index(field) for key, field in fields.items()}


class Jsonl(FileSource):
    """One JSON object per line; blank lines are no examples."""

    settings = (*FileSource.settings, "fields", "language_fields")
    examples = None
    reads_chats = True
    entry = "'train-*.jsonl.gz'"

    def read_file(self, path: Path) -> Iterator[Example]:
        read = record_reader(self.cfg, self.keys, *self.directions)
        for number, line in self.filled(numbered_lines(path, self.bad)):
            try:
                yield read(json.loads(line))
            except DataError as error:
                self.bad.reject(path, number, str(error))
            except (ValueError, RecursionError) as error:  # too many digits, or too many brackets
                self.bad.reject(path, number, f"is not valid JSON ({getattr(error, 'msg', error)})")


def record_reader(cfg: DataConfig, keys: Sequence[str], direction: Direction | None = None) -> Callable[[Any], Example]:
    """Returns what reads the example of a record, and raises `DataError` for one that does not fit."""
    if keys == CHATS:
        return functools.partial(read_chat, fields=cfg.fields)
    return functools.partial(as_example, fields=field_names(cfg, keys, direction))


def field_names(cfg: DataConfig, keys: Sequence[str], direction: Direction | None = None) -> dict[str, str]:
    """Maps each key of an example to the field of a record, and `LANGUAGES` to `cfg.language_fields`.

    Args:
        direction: its languages replace `{src}` and `{tgt}` in fields.

    Raises:
        UserError: the settings do not name one field per key.
    """
    if cfg.fields and len(cfg.fields) != len(keys):
        problem = f"must name {len(keys)} fields, for {' and '.join(keys)}"
        raise cfg.error("fields", problem + "".join(map(separated, cfg.fields[:1])))
    if cfg.language_fields and len(cfg.language_fields) != len(LANGUAGES):
        raise cfg.error("language_fields", "must name 2 fields, for the languages of source and target")
    languages = dict(zip(LANGUAGES, cfg.language_fields, strict=False))
    fields = cfg.fields if direction is None else [fill(field, direction) for field in cfg.fields]
    return dict(zip(keys, fields or keys, strict=True)) | languages


def with_direction(values: dict[str, str]) -> Example:
    """Replaces `LANGUAGES`, if an example has them, by its direction, and cleans the white space of its label.

    Raises:
        DataError: the languages are no direction.
    """
    if "label" in values:
        return {**values, "label": clean_whitespace(values["label"])}
    if LANGUAGES[0] not in values:
        return values
    direction = direction_of(*(values.pop(key) for key in LANGUAGES))
    return {**values, "direction": direction}


def as_example(record: Any, fields: dict[str, str]) -> Example:
    """Builds an example from the fields of a record; a label may be an integer.

    Raises:
        DataError: a field is missing or is not text.
    """
    if not isinstance(record, dict):
        raise DataError("is not an object with named fields")
    values = {key: read_field(record, field, of_language=key in LANGUAGES) for key, field in fields.items()}
    for key, value in values.items():
        if not isinstance(value, str) and not (key == "label" and is_integer(value)):
            expected = "text or an integer" if key == "label" else "text"
            raise DataError(f"field {fields[key]!r} is {type_name(value)}, not {expected}")
        if not is_unicode(str(value)):
            raise DataError(f"field {fields[key]!r} {NOT_A_CHARACTER}")
    return with_direction({key: str(value) for key, value in values.items()})


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer of Python or NumPy, and no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def read_field(record: dict[str, Any], field: str, *, of_language: bool = False) -> Any:
    """Returns a field of a record; `a.b` is field b of the object in field a, unless a field has this name.

    Args:
        of_language: whether the field names a language.
    """
    if field in record:
        return record[field]
    outer, dot, inner = field.partition(".")
    if dot and isinstance(record.get(outer), dict):
        return read_field(record[outer], inner, of_language=of_language)
    if dot and outer in record:
        raise DataError(f"field {outer!r} is {type_name(record[outer])}, not an object with the field {inner!r}")
    raise DataError(describe_missing_field(field, record, of_language=of_language))


def describe_missing_field(field: str, names: Iterable[str], *, of_language: bool) -> str:
    """Returns what is wrong with a record that lacks a field, which may name a language."""
    return f"has no field {field!r}, only {', '.join(map(repr, names))}: set data.{'language_' * of_language}fields"
