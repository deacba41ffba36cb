"""Corpora in files below the data folder, one function a kind of file."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tformer_jax.config import Config, DataConfig
from tformer_jax.data.corpora.corpus import KEYS, DataError, Example
from tformer_jax.data.corpora.lines import BadLines, numbered_lines, read_text

HOMES = {
    "multi30k": "task 1 of the GitHub repository multi30k/dataset",
    "tiny_shakespeare": "data/tinyshakespeare/input.txt of the GitHub repository karpathy/char-rnn",
    "tatoeba_en_zh": "cmn-eng.zip of manythings.org/anki, as English<tab>Chinese lines",
    "rt_polarity": "Pang and Lee's sentence polarity dataset v1.0, as label<tab>sentence lines",
}
"""Where the corpora of the shipped configs come from, by the first folder of their path."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads the entries of `data.train` and its neighbours as examples, one after another."""

    cfg: DataConfig
    root: Path | None
    keys: tuple[str, ...]
    bad: BadLines

    def __call__(self, name: str) -> Iterator[Example]:
        """The examples of all files that a path or glob stands for.

        Raises:
            DataError: a file is missing or empty, or holds a line that cannot be read and is not to be skipped.
        """
        return KINDS[self.cfg.source](self, name)

    def each_file(self, name: str, read: Callable[["Reader", Path], Iterator[Example]]) -> Iterator[Example]:
        """The examples of each file that `name` stands for, in the order of their paths."""
        return itertools.chain.from_iterable(read(self, path) for path in locate(self.root, name))


def reader(cfg: Config, root: Path | None, bad: BadLines) -> Reader:
    """The reader of what `cfg.data.source` names."""
    return Reader(cfg.data, root, KEYS[cfg.model.family], bad)


def parallel_lines(read: Reader, name: str) -> Iterator[Example]:
    """Translation pairs in two files, parallel by line number; `{lang}` in the path stands for the language."""
    languages = (read.cfg.source_language, read.cfg.target_language)
    sides = [locate(read.root, name.format(lang=language)) for language in languages]
    if len(sides[0]) != len(sides[1]):
        raise DataError(f"{name} stands for {len(sides[0])} {languages[0]} files, but {len(sides[1])} {languages[1]}")
    for source, target in zip(*sides, strict=True):
        yield from _pairs(source, target, read.bad)


def tsv(read: Reader, name: str) -> Iterator[Example]:
    """Tab-separated columns: source and target, or label and text."""
    columns = [int(field) - 1 for field in _numbers(read.cfg)] or [0, 1]
    keys = read.keys if read.cfg.fields or "source" in read.keys else tuple(reversed(read.keys))
    expected = f"{max(columns) + 1} columns" if read.cfg.fields else "<tab>".join(keys)

    def read_file(read: Reader, path: Path) -> Iterator[Example]:
        for number, line in numbered_lines(path, read.bad):
            if line is None:
                continue
            cells = line.split("\t")
            if len(cells) <= max(columns) or (not read.cfg.fields and len(cells) != len(columns)):
                read.bad.found(path, number, f"has {len(cells)} columns where {expected} is expected")
            else:
                yield {key: cells[column] for key, column in zip(keys, columns, strict=True)}

    return read.each_file(name, read_file)


def jsonl(read: Reader, name: str) -> Iterator[Example]:
    """One JSON object a line."""
    fields = field_names(read.cfg, read.keys)

    def read_file(read: Reader, path: Path) -> Iterator[Example]:
        for number, line in numbered_lines(path, read.bad):
            if line is None:
                continue
            try:
                yield as_example(json.loads(line), fields)
            except json.JSONDecodeError as error:
                read.bad.found(path, number, f"is not valid JSON ({error.msg})")
            except DataError as error:
                read.bad.found(path, number, str(error))

    return read.each_file(name, read_file)


def columnar(read: Reader, name: str) -> Iterator[Example]:
    """Rows of a Parquet file, or of an Arrow or Feather file."""
    fields = field_names(read.cfg, read.keys)

    def read_file(read: Reader, path: Path) -> Iterator[Example]:
        read.bad.start(path)
        number = 0
        try:
            for batch in _record_batches(path):
                for row in batch.to_pylist():
                    number += 1
                    try:
                        yield as_example(row, fields)
                    except DataError as error:
                        read.bad.found(path, number, str(error))
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            read.bad.found(path, number + 1, f"from here on, this is not a complete Parquet or Arrow file ({reason})")
        if not number:
            raise DataError(f"{path} is empty")

    return read.each_file(name, read_file)


def text(read: Reader, name: str) -> Iterator[Example]:
    """One document a file."""
    return read.each_file(name, lambda read, path: iter([{"text": read_text(path, read.bad)}]))


def lines(read: Reader, name: str) -> Iterator[Example]:
    """One document a line; blank lines are none."""

    def read_file(read: Reader, path: Path) -> Iterator[Example]:
        return ({"text": line} for _, line in numbered_lines(path, read.bad) if line and line.strip())

    return read.each_file(name, read_file)


KINDS: dict[str, Callable[[Reader, str], Iterator[Example]]] = {
    "parallel_lines": parallel_lines,
    "tsv": tsv,
    "jsonl": jsonl,
    "parquet": columnar,
    "text": text,
    "lines": lines,
}


def locate(root: Path | None, name: str) -> list[Path]:
    """The files below the data folder that a path or glob stands for, in the order of their names.

    Raises:
        DataError: no folder was given, or there is no such file.
    """
    home = HOMES.get(Path(name).parts[0])
    origin = f" (it comes from {home})" if home else ""
    if root is None and not Path(name).is_absolute():
        raise DataError(
            f"this config reads {name}{origin} below a data folder: name the folder with --data DIR "
            "or the environment variable TFORMER_DATA"
        )
    path = Path(root or "") / name
    if path.is_file():
        return [path]
    found = sorted(file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())
    if not found:
        raise DataError(f"{path} does not exist{origin}: put it there, or name another folder with --data DIR")
    return found


def field_names(cfg: DataConfig, keys: Sequence[str]) -> dict[str, str]:
    """The record's field for each key of an example.

    Raises:
        ConfigError: `cfg.fields` has another number of names.
    """
    if cfg.fields and len(cfg.fields) != len(keys):
        raise cfg.error("fields", f"must name {len(keys)} fields, for {' and '.join(keys)}")
    return dict(zip(keys, cfg.fields or keys, strict=True))


def as_example(record: Any, fields: dict[str, str]) -> Example:
    """The fields of one record, by the example's keys; whole numbers serve as labels.

    Raises:
        DataError: a field is missing, or is no text.
    """
    if not isinstance(record, dict):
        raise DataError("is no object with named fields")
    for key, field in fields.items():
        if field not in record:
            raise DataError(f"has no field {field!r}, only {', '.join(map(repr, record))}: set data.fields")
        if not isinstance(record[field], str | int if key == "label" else str):
            raise DataError(f"field {field!r} is {type(record[field]).__name__}, not text")
    return {key: str(record[field]) for key, field in fields.items()}


def _pairs(source: Path, target: Path, bad: BadLines) -> Iterator[Example]:
    counts = [0, 0]
    for pair in itertools.zip_longest(numbered_lines(source, bad), numbered_lines(target, bad)):
        counts = [count + (line is not None) for count, line in zip(counts, pair, strict=True)]
        texts = [line[1] for line in pair if line is not None]
        if len(texts) == 2 and texts[0] is not None and texts[1] is not None:
            yield {"source": texts[0], "target": texts[1]}
    if counts[0] != counts[1]:
        longer, shorter = (source, target) if counts[0] > counts[1] else (target, source)
        for number in range(min(counts) + 1, max(counts) + 1):
            bad.found(
                longer,
                number,
                f"has no counterpart: {source} has {counts[0]} lines but {target} has {counts[1]}, and parallel files "
                f"need equal numbers; look for the first pair that does not match above the end of {shorter.name}",
            )


def _numbers(cfg: DataConfig) -> tuple[str, ...]:
    for field in cfg.fields:
        if not field.isdecimal() or field == "0":
            raise cfg.error("fields", "must be column numbers for data.source='tsv', such as ('1', '2')")
    if cfg.fields and len(cfg.fields) != 2:
        raise cfg.error("fields", "must be two column numbers for data.source='tsv'")
    return cfg.fields


def _record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
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
