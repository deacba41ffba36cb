"""The splits of prepared data: texts and token ids in array_record files, which `scripts/prepare_data.py` writes.

FOLDER/
  dataset.json             format, family, labels, vocabulary size; files and statistics of each split, checksums
  tokenizers/              the tokenizers of the ids
  SPLIT-00000-of-00004.array_record
                           example i is record i // files of file i % files
  SPLIT.lengths            number of ids of each field of each example, little-endian uint32
  SPLIT.tokens             plain text: the ids of all examples, with the EOS token between two of them, little-endian
                           uint16 or uint32
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from tformer_jax.base.errors import first_line
from tformer_jax.data.columns import Block, Column, TokenIds, join_examples, split_examples
from tformer_jax.data.corpora.corpus import DataError, Example, Indexed, Joined, spread

LENGTH = np.dtype("<u4")
SUFFIXES = (".array_record", ".lengths", ".tokens")
COMPARED = 1_000
"""Maximum number of texts to compare of two splits."""


def id_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of stored ids."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def encode_record(texts: Sequence[str], ids: Sequence[np.ndarray], dtype: np.dtype) -> bytes:
    """Encodes an example: the lengths of all ids and texts, then the ids, then the texts in UTF-8."""
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    sizes = np.array([*map(len, ids), *map(len, raw)], "<u4")
    return b"".join([sizes.tobytes(), *(part.astype(dtype).tobytes() for part in ids), *raw])


def decode_ids(records: Sequence[bytes], count: int, dtype: np.dtype) -> list[Column]:
    """Decodes the ids of `records`, one column for each of their `count` fields."""
    sizes = np.frombuffer(b"".join([record[: 4 * count] for record in records]), "<u4").reshape(len(records), count)
    start, stops = 8 * count, (8 * count + dtype.itemsize * sizes.sum(axis=1)).tolist()
    raw = b"".join([record[start:stop] for record, stop in zip(records, stops, strict=True)])
    ids = np.frombuffer(raw, dtype).astype(np.int32)
    field = np.repeat(np.tile(np.arange(count), len(records)), sizes.ravel())
    return [Column(ids[field == number], sizes[:, number].astype(np.int64)) for number in range(count)]


def decode_texts(record: bytes, count: int, dtype: np.dtype) -> list[str]:
    """Decodes the texts of the `count` fields of a record."""
    sizes = np.frombuffer(record, "<u4", 2 * count)
    start = 8 * count + dtype.itemsize * int(sizes[:count].sum())
    places = itertools.pairwise(itertools.accumulate(sizes[count:].tolist(), initial=start))
    return [record[start:stop].decode("utf-8", "surrogatepass") for start, stop in places]


@dataclasses.dataclass(frozen=True)
class StoredIds:
    """The first `size` ids of a file, memory-mapped; a pickled copy maps the file again."""

    path: Path
    dtype: np.dtype
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        return self._ids[places]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_ids"}

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        if not self.size:  # an empty file cannot be mapped
            return np.zeros(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", shape=(self.size,))


class Records(Indexed[Example]):
    """A split as a sequence of examples of text; `read` returns token ids."""

    def __init__(
        self, folder: Path, split: str, files: list[str], size: int, keys: Sequence[str], dtype: np.dtype, end: int
    ):
        self.folder, self.split = folder, split
        self._files, self._size = files, size
        self._keys, self._dtype, self._end = keys, dtype, end
        self._range = range(size)
        self._readers: list[ArrayRecordReader | None] = [None] * len(files)
        for number, name in enumerate(files):
            expected = len(range(number, size, len(files)))
            if not (folder / name).is_file():
                raise DataError(f"{folder / name} does not exist: prepare the data again")
            actual = self._access(number, lambda reader: reader.num_records())
            if actual != expected:
                raise DataError(f"{folder / name} has {actual} records instead of {expected}: prepare the data again")

    def select(self, start: int, size: int) -> "Records":
        """Returns `size` consecutive examples."""
        selected = copy.copy(self)
        selected._range = self._range[start : start + size]
        return selected

    def __len__(self) -> int:
        return len(self._range)

    def element(self, index: int) -> Example:
        (record,) = self._records([self._range[index]])
        return dict(zip(self._keys, decode_texts(record, len(self._keys), self._dtype), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_lengths", "_starts", "_stream")
        values = {name: value for name, value in self.__dict__.items() if name not in mapped}
        return values | {"_readers": [None] * len(self._files)}

    def read(self, indices: Sequence[int]) -> Block:
        """Returns the token ids of the examples at `indices`."""
        records = self._records([self._range[int(index)] for index in indices])
        return dict(zip(self._keys, decode_ids(records, len(self._keys), self._dtype), strict=True))

    def lengths(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns the number of ids of the examples at `indices` by key: int64 [examples]."""
        rows = self._lengths[self._range.start + np.asarray(indices)].astype(np.int64)
        return dict(zip(self._keys, rows.T, strict=True))

    def is_copy(self, other: "Records") -> bool:
        """Returns whether another split has the same examples: equal lengths, and at most `COMPARED` equal texts."""
        if len(self) != len(other):
            return False
        own, others = (records.lengths(range(len(self))) for records in (self, other))
        same = all(np.array_equal(own[key], others[key]) for key in own)
        return same and all(self[index] == other[index] for index in spread(len(self), COMPARED))

    def span(self, index: int, start: int, size: int) -> np.ndarray:
        """Returns `size` ids of a document from `start` on and the next one, or the EOS token: int32 [size + 1]."""
        first = int(self._starts[index]) + start
        ids = np.full(size + 1, self._end, np.int32)
        available = self._stream[first : first + size + 1]
        ids[: len(available)] = available
        return ids

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """Offsets of the documents in the token stream: int64 [examples]."""
        sizes = self._lengths[:, 0].astype(np.int64) + 1
        return np.cumsum(sizes) - sizes

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        """uint32 [examples, fields], memory-mapped."""
        shape = self._size, len(self._keys)
        path = self._file_of_size(".lengths", LENGTH.itemsize * shape[0] * shape[1])
        return np.memmap(path, LENGTH, mode="r", shape=shape)

    def stream(self) -> StoredIds | None:
        """Returns the tokens of all documents, separated by the EOS token; None for pairs."""
        return self._stream if self._keys == ("text",) else None

    @functools.cached_property
    def _stream(self) -> StoredIds:
        size = int(self._lengths[:, 0].sum(dtype=np.int64)) + self._size - 1
        return StoredIds(self._file_of_size(".tokens", self._dtype.itemsize * size), self._dtype, size)

    def _file_of_size(self, suffix: str, size: int) -> Path:
        """Returns a file of the split, which has `size` bytes."""
        path = self.folder / f"{self.split}{suffix}"
        if not path.is_file() or path.stat().st_size != size:
            raise DataError(f"{path} is missing or of another size: prepare the data again")
        return path

    def _records(self, indices: list[int]) -> list[bytes]:
        files = len(self._files)
        records: list[bytes] = [b""] * len(indices)
        for number in range(files):
            outputs = [output for output, index in enumerate(indices) if index % files == number]
            if outputs:
                offsets = [indices[output] // files for output in outputs]
                in_file = self._access(number, lambda reader, offsets=offsets: reader.read(offsets))
                for output, record in zip(outputs, in_file, strict=True):
                    records[output] = record
        return records

    def _access(self, number: int, action: Any) -> Any:
        """Returns `action(reader)` for the reader of a file, which is opened on first use."""
        path = self.folder / self._files[number]
        try:
            reader = self._readers[number] or ArrayRecordReader(str(path), options="readahead_buffer_size:0")
            self._readers[number] = reader
            return action(reader)
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise DataError(f"{path} is damaged ({first_line(error, 200)}): prepare the data again") from error


class JoinedRecords(Joined):
    """Concatenation of the same split of several folders."""

    def read(self, indices: Sequence[int]) -> Block:
        """Returns the token ids of the examples at `indices`."""
        examples: list[TokenIds] = [{} for _ in indices]
        for part, outputs, inside in self._by_part(indices):
            for output, example in zip(outputs, split_examples(part.read(inside)), strict=True):
                examples[output] = example
        return join_examples(examples)

    def lengths(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns the number of ids of the examples at `indices` by key: int64 [examples]."""
        result: dict[str, np.ndarray] = {}
        for part, outputs, inside in self._by_part(indices):
            for key, lengths in part.lengths(inside).items():
                result.setdefault(key, np.zeros(len(indices), np.int64))[outputs] = lengths
        return result

    def span(self, index: int, start: int, size: int) -> np.ndarray:
        """Returns `size` ids of a document from `start` on and the next one, or the EOS token: int32 [size + 1]."""
        number, inside = self.locate(index)
        return self.parts[number].span(inside, start, size)

    def _by_part(self, indices: Sequence[int]) -> Iterator[tuple[Records, list[int], list[int]]]:
        """Yields each part that holds some of the indices, their positions in `indices`, and their indices there."""
        located = [self.locate(int(index)) for index in indices]
        for number, part in enumerate(self.parts):
            outputs = [output for output, (owner, _) in enumerate(located) if owner == number]
            if outputs:
                yield part, outputs, [located[output][1] for output in outputs]
