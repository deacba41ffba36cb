"""Corpora that `scripts/prepare_data.py` wrote: texts and their token ids in array_record files, read in any order.

FOLDER/
  dataset.json             format, family, labels, vocabulary size, and for each split its files and summary
  tokenizers/              the tokenizers that made the ids
  SPLIT-00000-of-00004.array_record
                           example i is record i // files of file i % files
  SPLIT.tokens             language models: the token stream, little-endian uint16 or uint32
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from tformer_jax.config import Config
from tformer_jax.data.columns import Block, Column, Tokens, join_examples, split_examples
from tformer_jax.data.corpora.corpus import KEYS, Corpus, DataError, Example, Joined

FORMAT = 1
TOKENIZERS = "tokenizers"


def id_dtype(vocab_size: int) -> np.dtype:
    """How an id is stored."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def encode_record(texts: Sequence[str], ids: Sequence[np.ndarray], dtype: np.dtype) -> bytes:
    """One example: the sizes of all ids and of all texts, then the ids, then the texts in UTF-8."""
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    sizes = np.array([*map(len, ids), *map(len, raw)], "<u4")
    return b"".join([sizes.tobytes(), *(part.astype(dtype).tobytes() for part in ids), *raw])


def decode_ids(records: Sequence[bytes], count: int, dtype: np.dtype) -> list[Column]:
    """The ids of each of the `count` fields of some records."""
    sizes = np.frombuffer(b"".join([record[: 4 * count] for record in records]), "<u4").reshape(len(records), count)
    start, stops = 8 * count, (8 * count + dtype.itemsize * sizes.sum(axis=1)).tolist()
    raw = b"".join([record[start:stop] for record, stop in zip(records, stops, strict=True)])
    ids = np.frombuffer(raw, dtype).astype(np.int32)
    field = np.repeat(np.tile(np.arange(count), len(records)), sizes.ravel())
    return [Column(ids[field == number], sizes[:, number].astype(np.int64)) for number in range(count)]


def decode_texts(record: bytes, count: int, dtype: np.dtype) -> list[str]:
    """The texts of the `count` fields of a record."""
    sizes = np.frombuffer(record, "<u4", 2 * count)
    start = 8 * count + dtype.itemsize * int(sizes[:count].sum())
    texts = []
    for size in sizes[count:].tolist():
        texts.append(record[start : start + size].decode("utf-8", "surrogatepass"))
        start += size
    return texts


class Records(Sequence[Example]):
    """One split: a sequence of texts, and by `read` of ids."""

    def __init__(self, folder: Path, split: str, files: list[str], size: int, keys: Sequence[str], dtype: np.dtype):
        self._folder, self._split, self._files, self._size = folder, split, files, size
        self._keys, self._dtype = keys, dtype
        self._readers: list[ArrayRecordReader | None] = [None] * len(files)
        for number, name in enumerate(files):
            expected = len(range(number, size, len(files)))
            if not (folder / name).is_file():
                raise DataError(f"{folder / name} does not exist: prepare the data again")
            found = self._attempt(number, lambda reader: reader.num_records())
            if found != expected:
                raise DataError(f"{folder / name} holds {found} records instead of {expected}: prepare the data again")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        (record,) = self._records([range(len(self))[index]])
        return dict(zip(self._keys, decode_texts(record, len(self._keys), self._dtype), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": [None] * len(self._files)}

    def read(self, places: Sequence[int], rng: np.random.Generator | None = None) -> Block:
        """The token ids of the examples in some places."""
        records = self._records([int(place) for place in places])
        return dict(zip(self._keys, decode_ids(records, len(self._keys), self._dtype), strict=True))

    @property
    def stream(self) -> np.ndarray | None:
        """All documents one after another, with EOS between them, as a memory-mapped array; None for pairs."""
        path = self._folder / f"{self._split}.tokens"
        return np.memmap(path, self._dtype, mode="r") if path.exists() else None

    def _records(self, places: list[int]) -> list[bytes]:
        files = len(self._files)
        found: list[bytes] = [b""] * len(places)
        for number in range(files):
            wanted = [order for order, place in enumerate(places) if place % files == number]
            if wanted:
                inside = [places[order] // files for order in wanted]
                for order, record in zip(wanted, self._attempt(number, lambda r, i=inside: r.read(i)), strict=True):
                    found[order] = record
        return found

    def _attempt(self, number: int, action: Any) -> Any:
        """What `action` gives for a file's reader, which is opened when it is needed first."""
        path = self._folder / self._files[number]
        try:
            reader = self._readers[number] or ArrayRecordReader(str(path), options="readahead_buffer_size:0")
            self._readers[number] = reader
            return action(reader)
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            reason = str(error).splitlines()[0][:200]
            raise DataError(f"{path} is damaged ({reason}): prepare the data again") from error


class JoinedRecords(Joined):
    """The same split of several folders, one after another."""

    def read(self, places: Sequence[int], rng: np.random.Generator | None = None) -> Block:
        """The token ids of the examples in some places."""
        located = [self.locate(int(place)) for place in places]
        found: list[Tokens] = [{} for _ in located]
        for number, part in enumerate(self.parts):
            wanted = [order for order, (where, _) in enumerate(located) if where == number]
            if wanted:
                block = part.read([located[order][1] for order in wanted])
                for order, example in zip(wanted, split_examples(block), strict=True):
                    found[order] = example
        return join_examples(found)


def load(cfg: Config, root: Path | None) -> Corpus:
    """The prepared folders that `cfg.data.train` names; held-out splits are those of all of them, one after another.

    Raises:
        DataError: a folder holds no prepared data, is damaged, of another family, or differs from the first one in
            its tokenizers or labels.
    """
    folders = [Path(root or "") / name for name in cfg.data.train]
    facts = [_facts(folder, cfg.model.family) for folder in folders]
    for folder, fact in zip(folders, facts, strict=True):
        if (fact["tokenizers"], fact["labels"]) != (facts[0]["tokenizers"], facts[0]["labels"]):
            raise DataError(
                f"{folder} has other tokenizers or labels than {folders[0]}: prepare both with the same tokenizers"
            )
    keys = KEYS[cfg.model.family]
    dtype = id_dtype(facts[0]["vocab_size"])

    def joined(split: str) -> Records | JoinedRecords:
        parts = []
        for folder, fact in zip(folders, facts, strict=True):
            files, size = fact["splits"][split]["files"], fact["splits"][split]["examples"]
            parts.append(Records(folder, split, files, size, keys, dtype))
        return parts[0] if len(parts) == 1 else JoinedRecords(parts)

    labels = tuple(facts[0]["labels"]) if facts[0]["labels"] is not None else None
    return Corpus(joined("train"), joined("validation"), joined("test"), labels, folders[0] / TOKENIZERS)


def _facts(folder: Path, family: str) -> dict[str, Any]:
    path = folder / "dataset.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise DataError(f"{path} has format {facts['format']}, not {FORMAT}: prepare the data again")
    except FileNotFoundError:
        raise DataError(f"{folder} is not what scripts/prepare_data.py writes: it has no dataset.json") from None
    except (ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged: {error}") from error
    if facts["family"] != family:
        raise DataError(f"{folder} was prepared for a {facts['family']} model, not for model.family={family!r}")
    return facts
