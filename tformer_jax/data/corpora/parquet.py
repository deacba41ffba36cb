"""Rows of Parquet, Arrow and Feather files."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tformer_jax.base.errors import first_line
from tformer_jax.data.corpora.chats import is_chat_field
from tformer_jax.data.corpora.corpus import CHATS, DataError, Example
from tformer_jax.data.corpora.files import FileSource
from tformer_jax.data.corpora.lines import NOT_UTF8
from tformer_jax.data.corpora.records import describe_missing_field, field_names, record_reader

MAGIC = b"PAR1"
TOOLS = ("tools", "tool_calls")
"""Fields of conversations whose values are of any form."""


class Parquet(FileSource):
    """Rows of Parquet, Arrow or Feather files."""

    settings = (*FileSource.settings, "fields", "language_fields")
    examples = None
    reads_chats = True
    entry = "'train.parquet'"

    def read_file(self, path: Path) -> Iterator[Example]:
        read = record_reader(self.cfg, self.keys)
        fields: Sequence[str] = () if self.keys == CHATS else list(field_names(self.cfg, self.keys).values())
        self.bad.start(path)
        number = 0
        try:
            for batch in _record_batches(path):
                names = batch.schema.names
                columns = {field: field if field in names else field.partition(".")[0] for field in fields}
                if missing := next((field for field, column in columns.items() if column not in names), None):
                    problem = describe_missing_field(missing, names, of_language=missing in self.cfg.language_fields)
                    self.bad.reject(path, number + 1, problem, batch.num_rows)
                    number += batch.num_rows
                    continue
                if twice := next((column for column in columns.values() if names.count(column) > 1), None):
                    raise DataError(f"{path} names two columns {twice!r}: rename one of them")
                chosen = [name for name in names if is_chat_field(self.cfg, name)] or names
                chosen = chosen if self.keys == CHATS else [*{*columns.values()}]
                for row in _rows(batch.select(chosen)):  # others may not fit into Python
                    number += 1
                    if row is None:
                        self.bad.reject(path, number, NOT_UTF8)
                        continue
                    try:
                        yield read(_without_nulls(row) if self.keys == CHATS else row)
                    except DataError as error:
                        self.bad.reject(path, number, str(error))
        except (pa.ArrowException, OSError) as error:
            reason = first_line(error)
            problem = "from here on, this is" if number else "this is"
            self.bad.reject(path, number + 1, f"{problem} not a complete Parquet or Arrow file ({reason})")
        if not number:
            self.bad.reject_empty(path)


def _record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as start:
        is_parquet = start.read(len(MAGIC)) == MAGIC
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


def _without_nulls(value: Any, *, of_tools: bool = False) -> Any:
    """Returns a row without null fields of tools and their calls: Arrow's structs have the fields of all rows."""
    if isinstance(value, list):
        return [_without_nulls(part, of_tools=of_tools) for part in value]
    if not isinstance(value, dict):
        return value
    named = {name: part for name, part in value.items() if not (of_tools and part is None)}
    return {name: _without_nulls(part, of_tools=of_tools or name in TOOLS) for name, part in named.items()}


def _rows(batch: pa.RecordBatch) -> Iterable[dict[str, Any] | None]:
    """Returns the rows of a batch; None for each row with a string that is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return itertools.chain.from_iterable(_rows(batch.slice(number, 1)) for number in range(batch.num_rows))
