"""Readers of files in the data folder, one function per file format."""

import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tformer_jax.base.errors import first_line
from tformer_jax.config import Config, DataConfig
from tformer_jax.config.fields import separated
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora.corpus import DataError, Example
from tformer_jax.data.corpora.filters import BLANK_LINE, HEADER
from tformer_jax.data.corpora.lines import NOT_A_CHARACTER, NOT_UTF8, BadLines, is_unicode, numbered_lines, read_text

HOMES = {
    "multi30k": "task 1 of the GitHub repository multi30k/dataset",
    "tiny_shakespeare": "data/tinyshakespeare/input.txt of the GitHub repository karpathy/char-rnn",
    "tatoeba_en_zh": "cmn-eng.zip of manythings.org/anki, as English<tab>Chinese lines",
    "rt_polarity": "Pang and Lee's sentence polarity dataset v1.0, as label<tab>sentence lines",
}
"""Origins of the shipped configs' corpora, by the first folder of their paths."""

PARQUET = b"PAR1"
"""First bytes of a Parquet file."""
WILDCARDS = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
"""Regular expressions of the wildcards of globs, except characters in brackets."""


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Reads the entries of `data.train`, `data.validation` and `data.test` as examples."""

    cfg: DataConfig
    root: Path | None
    keys: tuple[str, ...]
    bad: BadLines
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of lines without an example, by kind."""

    def __call__(self, name: str) -> Iterator[Example]:
        """Yields the examples of all files that match a path or glob.

        Raises:
            DataError: a file is missing or empty, or has a malformed line and `data.on_bad_line` is "stop".
        """
        return KINDS[self.cfg.source](self, name)

    def lines(self, path: Path) -> Iterator[tuple[int, str | None]]:
        """Yields the `numbered_lines` of a file after its header."""
        for number, line in numbered_lines(path, self.bad):
            if number == 1 and self.cfg.header:
                self.dropped[HEADER] += 1
            else:
                yield number, line

    def each_file(self, name: str, read_file: Callable[[Path], Iterator[Example]]) -> Iterator[Example]:
        """Yields the examples of each file that matches `name`, in the order of the paths."""
        return itertools.chain.from_iterable(read_file(path) for path in locate(self.root, name))


def file_reader(cfg: Config, root: Path | None, bad: BadLines, dropped: collections.Counter[str]) -> FileReader:
    """Returns the reader of the file format that `cfg.data.source` names; it counts lines without example."""
    return FileReader(cfg.data, root, task_of(cfg).keys, bad, dropped)


def parallel_lines(reader: FileReader, name: str) -> Iterator[Example]:
    """Reads translation pairs from two files, aligned by line; `{lang}` in the path is replaced by the language.

    The files of a glob are paired by the text in place of its wildcards.

    Raises:
        DataError: a file has no counterpart in the other language.
    """
    languages = (reader.cfg.source_language, reader.cfg.target_language)
    sources, targets = (_by_wildcards(reader.root, name, language) for language in languages)
    for alone in sorted(sources.keys() ^ targets.keys()):
        path, other = (sources[alone], languages[1]) if alone in sources else (targets[alone], languages[0])
        raise DataError(
            f"{path} has no counterpart in {other!r}: each file that {name!r} matches needs one in the other language, "
            "with the same text in place of the wildcards"
        )
    for key, source in sources.items():
        yield from _pairs(source, targets[key], reader)


def tsv(reader: FileReader, name: str) -> Iterator[Example]:
    """Reads tab-separated columns, without quotes: source and target, or label and text.

    Blank lines are no examples.
    """
    keys = reader.keys if reader.cfg.fields or "source" in reader.keys else tuple(reversed(reader.keys))

    def read_file(path: Path) -> Iterator[Example]:
        columns = _columns(reader, path)
        expected = f"{max(columns) + 1} columns" if reader.cfg.fields else "<tab>".join(keys)
        for number, line in reader.lines(path):
            if line is None:
                continue
            if not line.strip():
                reader.dropped[BLANK_LINE] += 1
                continue
            cells = line.split("\t")
            if len(cells) <= max(columns) or (not reader.cfg.fields and len(cells) != len(columns)):
                found = f"{len(cells)} column{'s' * (len(cells) != 1)}"
                reader.bad.record(path, number, f"has {found} where {expected} is expected")
            else:
                yield {key: cells[column] for key, column in zip(keys, columns, strict=True)}

    return reader.each_file(name, read_file)


def jsonl(reader: FileReader, name: str) -> Iterator[Example]:
    """Reads one JSON object per line; blank lines are no examples."""
    fields = field_names(reader.cfg, reader.keys)

    def read_file(path: Path) -> Iterator[Example]:
        for number, line in numbered_lines(path, reader.bad):
            if line is None:
                continue
            if not line.strip():
                reader.dropped[BLANK_LINE] += 1
                continue
            try:
                yield as_example(json.loads(line), fields)
            except DataError as error:
                reader.bad.record(path, number, str(error))
            except (ValueError, RecursionError) as error:  # too many digits, or too many brackets
                reader.bad.record(path, number, f"is not valid JSON ({getattr(error, 'msg', error)})")

    return reader.each_file(name, read_file)


def columnar(reader: FileReader, name: str) -> Iterator[Example]:
    """Reads the rows of Parquet, Arrow or Feather files."""
    fields = field_names(reader.cfg, reader.keys)

    def read_file(path: Path) -> Iterator[Example]:
        reader.bad.start(path)
        number = 0
        try:
            for batch in _record_batches(path):
                names = batch.schema.names
                columns = {field: field if field in names else field.partition(".")[0] for field in fields.values()}
                if missing := next((field for field, column in columns.items() if column not in names), None):
                    reader.bad.record(path, number + 1, _missing_field(missing, names), batch.num_rows)
                    number += batch.num_rows
                    continue
                for row in _rows(batch.select(list({*columns.values()}))):  # others may not fit into Python
                    number += 1
                    if row is None:
                        reader.bad.record(path, number, NOT_UTF8)
                        continue
                    try:
                        yield as_example(row, fields)
                    except DataError as error:
                        reader.bad.record(path, number, str(error))
        except (pa.ArrowException, OSError) as error:
            reason = first_line(error)
            problem = "from here on, this is" if number else "this is"
            reader.bad.record(path, number + 1, f"{problem} not a complete Parquet or Arrow file ({reason})")
        if not number:
            reader.bad.record_empty(path)

    return reader.each_file(name, read_file)


def text(reader: FileReader, name: str) -> Iterator[Example]:
    """Reads one document per file."""

    def read_file(path: Path) -> Iterator[Example]:
        return iter([{"text": read_text(path, reader.bad)}])

    return reader.each_file(name, read_file)


def lines(reader: FileReader, name: str) -> Iterator[Example]:
    """Reads one document per line."""

    def read_file(path: Path) -> Iterator[Example]:
        return ({"text": line} for _, line in reader.lines(path) if line is not None)

    return reader.each_file(name, read_file)


KINDS: dict[str, Callable[[FileReader, str], Iterator[Example]]] = {
    "parallel_lines": parallel_lines,
    "tsv": tsv,
    "jsonl": jsonl,
    "parquet": columnar,
    "text": text,
    "lines": lines,
}


def locate(root: Path | None, name: str) -> list[Path]:
    """Returns the files in the data folder that match a path or glob, sorted by name.

    Raises:
        DataError: no folder is given, the path is that of a folder, the glob is invalid, or no file matches.
    """
    if not name:
        raise DataError("an entry of data.train, data.validation or data.test is empty: name a file")
    home = HOMES.get("".join(Path(name).parts[:1]))
    origin = f" (it comes from {home})" if home else ""
    if root is None and not Path(name).is_absolute():
        raise DataError(
            f"this config reads {name}{origin} below a data folder: name the folder with --data DIR "
            "or the environment variable TFORMER_DATA"
        )
    path = Path(root or "") / name
    if path.is_file():
        return [path]
    if path.is_dir():
        raise DataError(f"{path} is a folder: name a file in it, or a glob such as '*.gz' that matches its files")
    if any("**" in part and part != "**" for part in Path(name).parts):
        raise DataError(f"{name!r} is not a glob: write '**' only as a whole folder, such as '**/*.gz'")
    folder, glob = _anchored(root, name)
    files = sorted(file for file in folder.glob(glob) if file.is_file())
    if not files:
        missing = "matches no file" if any(character in name for character in "*?[") else "does not exist"
        put = f"put it there, or name another folder with --data DIR{separated(name)}"
        raise DataError(f"{path} {missing}{origin}: {put}")
    return files


def _anchored(root: Path | None, name: str) -> tuple[Path, str]:
    """Returns the folder to search, whose path is taken literally, and the glob relative to it."""
    path = Path(name)
    folder = Path(path.anchor or root or "")
    return folder, (path.relative_to(path.anchor) if path.anchor else path).as_posix()


def _by_wildcards(root: Path | None, name: str, language: str) -> dict[tuple[str, ...], Path]:
    """Returns the files of a language by the parts of their paths before, between and after its name."""
    folder, glob = _anchored(root, name)
    expression = re.escape(language).join(f"({_expression(part)})" for part in glob.split("{lang}"))
    found = {}
    for path in locate(root, name.replace("{lang}", language)):
        match = re.fullmatch(expression, path.relative_to(folder).as_posix())
        found[match.groups() if match else (name,)] = path  # a file may have brackets in its name
    return found


def _expression(glob: str) -> str:
    """Returns the regular expression for a part of a glob."""
    parts = re.split(r"(\*\*/|\*|\?|\[.+?\])", glob)
    for number in range(1, len(parts), 2):
        characters = parts[number][1:-1].replace("\\", r"\\").replace("[", r"\[")
        parts[number] = WILDCARDS.get(parts[number]) or f"[{re.sub('^!', '^', characters)}]"
    parts[::2] = map(re.escape, parts[::2])
    return "".join(parts)


def field_names(cfg: DataConfig, keys: Sequence[str]) -> dict[str, str]:
    """Maps each key of an example to the field of a record.

    Raises:
        UserError: `cfg.fields` does not name one field per key.
    """
    if cfg.fields and len(cfg.fields) != len(keys):
        problem = f"must name {len(keys)} fields, for {' and '.join(keys)}"
        raise cfg.error("fields", problem + "".join(map(separated, cfg.fields[:1])))
    return dict(zip(keys, cfg.fields or keys, strict=True))


def as_example(record: Any, fields: dict[str, str]) -> Example:
    """Builds an example from the fields of a record; a label may be an integer.

    Raises:
        DataError: a field is missing or is not text.
    """
    if not isinstance(record, dict):
        raise DataError("is not an object with named fields")
    values = {key: _value(record, field) for key, field in fields.items()}
    for key, value in values.items():
        if not isinstance(value, str | int if key == "label" else str):
            expected = "text or an integer" if key == "label" else "text"
            raise DataError(f"field {fields[key]!r} is {type(value).__name__}, not {expected}")
        if not is_unicode(str(value)):
            raise DataError(f"field {fields[key]!r} {NOT_A_CHARACTER}")
    return {key: str(value) for key, value in values.items()}


def _value(record: dict[str, Any], field: str) -> Any:
    """Returns a field of a record; `a.b` is field b of the object in field a, unless a field has this name."""
    if field in record:
        return record[field]
    outer, dot, inner = field.partition(".")
    if dot and isinstance(record.get(outer), dict):
        return _value(record[outer], inner)
    raise DataError(_missing_field(field, record))


def _missing_field(field: str, names: Iterable[str]) -> str:
    return f"has no field {field!r}, only {', '.join(map(repr, names))}: set data.fields"


def _pairs(source: Path, target: Path, reader: FileReader) -> Iterator[Example]:
    """Yields the pairs of two files; a line that is skipped in one of them leaves out its partner.

    Raises:
        DataError: one file has more lines, whatever `data.on_bad_line` says: no pair may be trusted then.
    """
    count = 0
    for first, second in itertools.zip_longest(reader.lines(source), reader.lines(target)):
        if first is None or second is None:
            longer, shorter = (source, target) if second is None else (target, source)
            raise DataError(
                f"{longer}, line {(first or second)[0]}: has no partner, because {shorter} ends after {count:,} lines: "
                "one of the files lacks lines, perhaps far above; look for the first misaligned pair"
            )
        count = first[0]
        if first[1] is not None and second[1] is not None:
            yield {"source": first[1], "target": second[1]}


def _columns(reader: FileReader, path: Path) -> list[int]:
    """Returns the columns, from 0, that `data.fields` names by numbers or by the names in a header."""
    cfg = reader.cfg
    if not cfg.fields:
        return [0, 1]
    if len(cfg.fields) != 2:
        raise cfg.error("fields", "must be two columns for data.source='tsv'")
    if all(field.isdecimal() and field != "0" for field in cfg.fields):
        return [int(field) - 1 for field in cfg.fields]
    if not cfg.header:
        raise cfg.error(
            "fields", "must be column numbers, such as ('1', '2'), for data.source='tsv' without data.header"
        )
    _, header = next(numbered_lines(path, reader.bad))
    names = (header or "").split("\t")
    if missing := [field for field in cfg.fields if field not in names]:
        raise DataError(f"{path} has no column {missing[0]!r}, only {', '.join(map(repr, names))}: set data.fields")
    return [names.index(field) for field in cfg.fields]


def _record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as start:
        is_parquet = start.read(len(PARQUET)) == PARQUET
    if is_parquet or path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches()
        return
    with pa.OSFile(str(path)) as file:
        try:
            batches = pa.ipc.open_file(file)
        except pa.ArrowInvalid:
            file.seek(0)
            yield from pa.ipc.open_stream(file)
        else:
            yield from (batches.get_batch(number) for number in range(batches.num_record_batches))


def _rows(batch: pa.RecordBatch) -> Iterable[dict[str, Any] | None]:
    """Returns the rows of a batch; None for those whose strings are not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return itertools.chain.from_iterable(_rows(batch.slice(number, 1)) for number in range(batch.num_rows))
