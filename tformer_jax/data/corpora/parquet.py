"""Rows of Parquet, Arrow and Feather files."""

import datetime
import decimal
import itertools
from collections.abc import Iterable, Iterator
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
WRITTEN = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)
"""Values of conversations that JSON does not have, and that become texts."""


class Parquet(FileSource):
    """Rows of Parquet, Arrow or Feather files."""

    settings = (*FileSource.settings, "fields", "language_fields")
    examples = None
    reads_chats = True
    entry = "'train.parquet'"

    def read_file(self, path: Path) -> Iterator[Example]:
        read = record_reader(self.cfg, self.keys, *self.directions)
        fields = [] if self.keys == CHATS else [*field_names(self.cfg, self.keys, *self.directions).values()]
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
                batch = batch.select(chosen if self.keys == CHATS else [*{*columns.values()}])
                maps = {field.name: field.type for field in batch.schema if _holds_map(field.type)}
                for row in _rows(batch, path):
                    number += 1
                    if row is None:
                        self.bad.reject(path, number, NOT_UTF8)
                        continue
                    try:
                        row |= {name: _with_objects(row[name], kind) for name, kind in maps.items()}
                        yield read(_as_json(row) if self.keys == CHATS else row)
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


def _as_json(value: Any, *, of_tools: bool = False) -> Any:
    """Returns a row with texts for times and decimals, and without null fields of tools and their calls.

    Arrow's structs have the fields of all rows.
    """
    if isinstance(value, list):
        return [_as_json(part, of_tools=of_tools) for part in value]
    if not isinstance(value, dict):
        return str(value) if isinstance(value, WRITTEN) else value
    named = {name: part for name, part in value.items() if not (of_tools and part is None)}
    return {name: _as_json(part, of_tools=of_tools or name in TOOLS) for name, part in named.items()}


def _rows(batch: pa.RecordBatch, path: Path) -> Iterable[dict[str, Any] | None]:
    """Returns the rows of a batch; None for each row with a string that is not UTF-8.

    Times become numbers if Python's types do not hold them.

    Raises:
        DataError: Python cannot hold the rows otherwise, as a struct with two fields of one name.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return itertools.chain.from_iterable(_rows(batch.slice(number, 1), path) for number in range(batch.num_rows))
    except (ValueError, OverflowError) as error:
        numbers = pa.schema([_inner(field) for field in batch.schema])
        if numbers == batch.schema:
            raise DataError(f"{path}: {first_line(error)}") from error
        return _rows(batch.cast(numbers), path)


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Returns a type with integers for times."""
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([_inner(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_inner(kind.key_field), _inner(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_inner(kind.value_field), kind.list_size)
    if _is_list(kind):
        return (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(_inner(kind.value_field))
    return kind


def _inner(field: pa.Field) -> pa.Field:
    """Returns a field with integers for times."""
    return field.with_type(_without_times(field.type))


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _holds_map(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_map(field.type) for field in kind)
    return pa.types.is_map(kind) or (_is_list(kind) and _holds_map(kind.value_type))


def _with_objects(value: Any, kind: pa.DataType) -> Any:
    """Returns a value of a row with objects for maps, which Arrow returns as lists of pairs.

    Raises:
        DataError: a map has a key twice.
    """
    if value is None or not _holds_map(kind):
        return value
    if pa.types.is_struct(kind):
        return {field.name: _with_objects(value[field.name], field.type) for field in kind}
    if not pa.types.is_map(kind):
        return [_with_objects(part, kind.value_type) for part in value]
    read = {key: _with_objects(part, kind.item_type) for key, part in value}
    if len(read) < len(value):
        raise DataError("a map has a key twice")
    return read
