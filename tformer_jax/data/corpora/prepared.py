"""Reads the corpora that `scripts/prepare_data.py` writes: texts and token ids in array_record files.

FOLDER/
  dataset.json             format, family, labels, vocabulary size; files and statistics of each split, checksums
  tokenizers/              the tokenizers of the ids
  SPLIT-00000-of-00004.array_record
                           example i is record i // files of file i % files
  SPLIT.lengths            number of ids of each field of each example, little-endian uint32
  SPLIT.tokens             plain text: the ids of all examples, with the EOS token between two of them, little-endian
                           uint16 or uint32
"""

import collections
import copy
import dataclasses
import functools
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from tformer_jax.base.errors import first_line
from tformer_jax.base.paths import checksum
from tformer_jax.config import Config, DataConfig, kinds, to_dict
from tformer_jax.config.task import task_of
from tformer_jax.data.columns import Block, Column, TokenIds, join_examples, split_examples
from tformer_jax.data.corpora.corpus import DIRECTIONS, FILE_SETTINGS, Corpus, DataError, Example, Joined, Source
from tformer_jax.data.corpora.splits import NAMES
from tformer_jax.special_tokens import EOS

FORMAT = 2
METADATA = {"family", "labels", "vocab_size", "tokenizers", "splits", "data"}
"""Keys of dataset.json that are read."""
LENGTH = np.dtype("<u4")
"""How a length is stored."""
TOKENIZERS = "tokenizers"
SUFFIXES = (".array_record", ".lengths", ".tokens")
TOKENIZER_SETTINGS = (
    *("tokenizer", "source_tokenizer", "target_tokenizer", "tokenizer_file"),
    *("vocab_size", "split_digits", "shared_vocab", "tokenizer_examples", "tokenizer_temperature"),
    *("character_coverage", "byte_fallback", "symbols"),
)
"""Settings that determine the tokenizers; not in dataset.json if the tokenizers were given."""
LANGUAGE_SETTINGS = ("source_language", "target_language", "directions", "both_directions", "language_fields")
STORED_SETTINGS = ("validation", "test", "validation_fraction", "fields", "header", "filters", "zero_shot")
"""Settings whose effect is stored; values other than the stored ones or the defaults have no effect."""


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
    texts = []
    for size in sizes[count:].tolist():
        texts.append(record[start : start + size].decode("utf-8", "surrogatepass"))
        start += size
    return texts


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


class Records(Sequence[Example]):
    """A split as a sequence of examples of text; `read` returns token ids."""

    def __init__(
        self, folder: Path, split: str, files: list[str], size: int, keys: Sequence[str], dtype: np.dtype, end: int
    ):
        self._folder, self._split, self._files, self._size = folder, split, files, size
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

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
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
        path = self._folder / f"{self._split}{suffix}"
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
        path = self._folder / self._files[number]
        try:
            reader = self._readers[number] or ArrayRecordReader(str(path), options="readahead_buffer_size:0")
            self._readers[number] = reader
            return action(reader)
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            reason = first_line(error, 200)
            raise DataError(f"{path} is damaged ({reason}): prepare the data again") from error


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
        ids: np.ndarray = self.parts[number].span(inside, start, size)
        return ids

    def _by_part(self, indices: Sequence[int]) -> Iterator[tuple[Records, list[int], list[int]]]:
        """Yields each part that holds some of the indices, their positions in `indices`, and their indices there."""
        located = [self.locate(int(index)) for index in indices]
        for number, part in enumerate(self.parts):
            outputs = [output for output, (owner, _) in enumerate(located) if owner == number]
            if outputs:
                yield part, outputs, [located[output][1] for output in outputs]


class Prepared(Source):
    """The prepared folders that `data.train` names; each split concatenates the folders that have it."""

    settings = (
        *(*FILE_SETTINGS, *DIRECTIONS, "language_fields", "fields", "languages", "dataset", "heldout_examples"),
        *("on_bad_line", "header", "filters"),
    )
    examples = None
    entry = "the folder that scripts/prepare_data.py wrote"

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` for workers, which could only read what a thread reads."""
        if data.workers and data.batching != "windows" and not data.transforms:
            raise data.error("workers", "must be 0 with data.source='prepared', whose tokens one thread reads")

    @classmethod
    def files(cls, cfg: Config, root: Path | None) -> list[Path]:
        """Returns the descriptions of the folders."""
        return [Path(root or "") / name / "dataset.json" for name in cfg.data.train]

    @classmethod
    def check_present(cls, cfg: Config, root: Path | None) -> None:
        """Raises `DataError` if data is missing."""
        cls.load(cfg, root)

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        """Opens the folders; logs which of them have no test split, if others have.

        Raises:
            DataError: a folder has no prepared data, is damaged or of another family, or its tokenizers or labels
                differ from the first folder's.
            UserError: a setting names data that is not in a folder.
        """
        folders = [Path(root or "") / name for name in cfg.data.train]
        metadata = [_metadata(folder, cfg) for folder in folders]
        for folder, entry in zip(folders, metadata, strict=True):
            if (entry["tokenizers"], entry["labels"]) != (metadata[0]["tokenizers"], metadata[0]["labels"]):
                raise DataError(
                    f"{folder} differs from {folders[0]} in its tokenizers or labels: prepare both with the "
                    "same tokenizers"
                )
        keys = stored_keys(cfg)
        dtype = id_dtype(metadata[0]["vocab_size"])

        def parts(split: str) -> list[Records]:
            records = []
            for folder, entry in zip(folders, metadata, strict=True):
                files, size = entry["splits"][split]["files"], entry["splits"][split]["examples"]
                records.append(Records(folder, split, files, size, keys, dtype, entry.get("end", EOS)))
            return records

        labels = tuple(metadata[0]["labels"]) if metadata[0]["labels"] is not None else None
        validation = _join(parts("validation"))
        tested = list(map(_has_test, metadata))
        test = _join(list(itertools.compress(parts("test"), tested))) if any(tested) else validation
        if len({*tested}) > 1:
            without = ", ".join(str(folder) for folder, has_test in zip(folders, tested, strict=True) if not has_test)
            logging.getLogger(__name__).warning("no test split: %s; the test examples are from the others", without)
        train, directions = parts("train"), None
        if cfg.data.multilingual:
            train, directions = _by_direction(train, [entry["splits"]["train"]["directions"] for entry in metadata])
        left_out = {split: _left_out(metadata, split) for split in NAMES}
        return Corpus(_join(train), validation, test, labels, directions, folders[0] / TOKENIZERS, left_out)


def stored_keys(cfg: Config) -> tuple[str, ...]:
    """Returns the keys of an example of prepared data."""
    return (*task_of(cfg).keys, "direction") if cfg.data.multilingual else task_of(cfg).keys


def _left_out(metadata: Sequence[dict[str, Any]], split: str) -> collections.Counter[str]:
    """Returns what was left out of a split when the folders were prepared."""
    counts = collections.Counter[str]()
    for entry in metadata:
        counts.update(entry["splits"][split].get("skipped", {}))
    return counts


def _join(parts: list[Records]) -> Records | JoinedRecords:
    return parts[0] if len(parts) == 1 else JoinedRecords(parts)


def _by_direction(folders: Sequence[Records], sizes: Sequence[dict[str, int]]) -> tuple[list[Records], dict[str, int]]:
    """Returns the records of several folders by direction, and the number of examples of each."""
    groups: dict[str, list[Records]] = {name: [] for folder in sizes for name in folder}
    for records, folder in zip(folders, sizes, strict=True):
        start = 0
        for name, size in folder.items():
            groups[name].append(records.select(start, size))
            start += size
    parts = [part for group in groups.values() for part in group]
    return parts, {name: sum(map(len, group)) for name, group in groups.items()}


def _has_test(metadata: dict[str, Any]) -> bool:
    """Returns whether the test split of a folder is not a copy of its validation split."""
    data = metadata["data"]
    source = data.get("source")
    own_splits = source in kinds.CORPORA and "test" not in kinds.load(kinds.CORPORA, source).settings
    return own_splits or data.get("test") != []


def check_files(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Raises `DataError` if a file of prepared data is missing, or differs from its checksum, if it has any."""
    for name, expected in metadata.get("checksums", {}).items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} does not exist: prepare the data again")
        if expected is not None and checksum(path) != expected:
            raise DataError(f"{path} is not the file that was prepared: restore it, or prepare the data again")


def _metadata(folder: Path, cfg: Config) -> dict[str, Any]:
    path = folder / "dataset.json"
    if folder.is_file():
        raise DataError(f"{folder} is a file: name the folder that scripts/prepare_data.py wrote")
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(metadata, dict) or "format" not in metadata:
            raise DataError(f"{path} was not written by scripts/prepare_data.py")
        if metadata["format"] != FORMAT:
            raise DataError(f"{path} has format {metadata['format']}, not {FORMAT}: prepare the data again")
        if missing := METADATA - metadata.keys():
            raise DataError(f"{path} is damaged: it has no {min(missing)!r}")
    except FileNotFoundError:
        raise DataError(f"{folder} is not the output of scripts/prepare_data.py: it has no dataset.json") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged: {error}") from error
    check_files(folder, metadata)
    settings = {"model.family": metadata["family"], "data.objective": metadata["data"].get("objective")}
    for name, value in {"model.family": cfg.model.family, "data.objective": cfg.data.objective}.items():
        if settings[name] != value:
            raise DataError(f"{folder} was prepared for {name}={settings[name]!r}, not {value!r}")
    prepared, wanted = {"placeholders": []} | metadata["data"], json.loads(json.dumps(to_dict(cfg.data)))
    for name in (*LANGUAGE_SETTINGS, "clean_whitespace", "normalize", "placeholders", *TOKENIZER_SETTINGS):
        if name in prepared and (before := prepared[name]) != (now := wanted[name]):
            raise DataError(f"{folder} was prepared with data.{name}={before!r}, not {now!r}: write {before!r}")
    for name in {*STORED_SETTINGS} & {changed.partition(".")[0] for changed in cfg.data.changed_settings()}:
        if wanted[name] != prepared.get(name):
            problem = f"is not read, because {folder} was prepared with {prepared.get(name)!r}"
            raise cfg.data.error(name, f"{problem}: leave it out, or prepare the data again")
    return metadata
