"""Distributions of a teacher that are stored beside prepared data: the most probable tokens of each label.

FOLDER/
  distributions.json  the number k of tokens, the teacher, the data, and whether all examples are stored
  train.top           k ids and k log-probabilities (float32), best first, of each label of each training example
  train.ends          number of labels up to and including each example, little-endian int64
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import write_text
from tformer_jax.config import Config
from tformer_jax.data.columns import TAUGHT, TAUGHT_IDS, TAUGHT_LOG_P, PendingExample, TokenIds
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.corpora.array_records import id_dtype
from tformer_jax.data.corpora.corpus import spread
from tformer_jax.data.features import feature_converter
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.rows import BLOCK, WHOLE_BATCH, IndexedReader, LengthReader, RowReader
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.special_tokens import IGNORED

FILES = FACTS, TOP, ENDS = "distributions.json", "train.top", "train.ends"
END = np.dtype("<i8")
CHECKED = 1000
"""Maximum number of examples whose ids are in the checksum of the data."""
AT_ONCE = 2**16
"""Number of labels to read, or of lengths to hash, at once."""
MAX_LABELS = 2**31
"""Places of labels are int32."""

Top = tuple[np.ndarray, np.ndarray]
"""Log-probabilities and ids of the most probable tokens of the labels of an example: [T, k] each."""


def is_stored(folder: str | Path) -> bool:
    """Returns whether a folder holds distributions, all or some."""
    return (Path(folder) / FACTS).is_file()


def read_facts(folder: Path) -> dict[str, Any]:
    """Reads `distributions.json`; raises `UserError` if it is damaged."""
    try:
        return {**json.loads((folder / FACTS).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / FACTS} is damaged ({error}): write the distributions again") from None


def facts_of_data(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> dict[str, Any]:
    """Returns what determines the labels of the training examples, in their order.

    Raises:
        UserError: the labels of an example change in training, or their contexts do.
    """
    if not isinstance(corpus.train, IndexedReader) or cfg.data.transforms:
        raise cfg.train.error("teacher", "stored distributions need data.source='prepared', without data.transforms")
    if cfg.data.batching == "windows":
        raise cfg.train.error("teacher", "stored distributions are of examples: set data.batching='packed'")
    convert, size = feature_converter(cfg, tokenizers), len(corpus.train)
    data = hashlib.blake2b(digest_size=16)
    for start in range(0, size, AT_ONCE):
        lengths = corpus.train.lengths(range(start, min(start + AT_ONCE, size)))
        data.update(np.stack([*lengths.values()]).tobytes())
    for column in corpus.train.read(spread(size, CHECKED)).values():
        data.update(column.ids.tobytes())
    described = json.dumps(tokenizers.to_json(), sort_keys=True).encode()
    return {
        "the tokenizers": hashlib.blake2b(described, digest_size=16).hexdigest(),
        "the prepared training examples": [size, data.hexdigest()],
        "model.family": cfg.model.family,
        "model.vocab_size": cfg.model.vocab_size,
        "the longest rows, data.long_pairs or data.long_documents": [
            *(convert.length, convert.source_length, convert.drop, convert.split)
        ],
        "data.filters.blank_sides": convert.drop_blank,
    }


def check_facts(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises `UserError` if stored distributions have other facts than `wanted`; it names the first difference."""
    for name, value in wanted.items():
        if stored.get(name) != value:
            there = f"{folder} has distributions for another value of {name}, {stored.get(name)} instead of {value}"
            raise UserError(f"{there}: write them again with --overwrite")


def label_key(cfg: Config) -> str:
    """Returns the key of the labels of a batch."""
    return str(cfg.model.model_class.labels)


class Distributions:
    """The distributions that `train.teacher` names, by the place of a label."""

    def __init__(self, cfg: Config, corpus: Corpus, tokenizers: Tokenizers):
        """Opens the files.

        Raises:
            UserError: they are of other data, incomplete or damaged.
        """
        folder = Path(str(cfg.train.teacher))
        facts = read_facts(folder)
        check_facts(folder, facts["data"], facts_of_data(cfg, corpus, tokenizers))
        if not facts["labels"]:
            raise UserError(f"{folder} is not complete: repeat the command that writes it")
        self._label = label_key(cfg)
        self._ends = np.memmap(folder / ENDS, END, mode="r")
        self._top = np.memmap(folder / TOP, record_dtype(facts["top"], cfg.model.vocab_size), mode="r")
        if (len(self._ends), len(self._top)) != (len(corpus.train), facts["labels"]):
            raise UserError(f"{folder} is damaged: write the distributions again")

    def with_lengths(self, lengths: dict[str, int]) -> dict[str, int]:
        """Adds the length of `TAUGHT` to the lengths of the features of an example."""
        return {**lengths, TAUGHT: lengths[self._label]}

    def with_places(self, example: PendingExample, ids: TokenIds, piece_length: int) -> TokenIds:
        """Returns the ids of an example, with the places of its labels."""
        start = int(self._ends[example.position - 1]) if example.position else 0
        first = start + example.piece * piece_length
        return {**ids, TAUGHT: np.arange(first, first + len(ids[self._label]), dtype=np.int32)}

    def look_up(self, batch: Batch) -> Batch:
        """Replaces the places of labels by ids int32 [B, T, k] and log-probabilities float32 [B, T, k]."""
        places = batch[TAUGHT]
        top = self._top[np.maximum(places, 0)]
        others = {name: array for name, array in batch.items() if name != TAUGHT}
        log_p = np.where(places[..., None] == IGNORED, np.float32(0), top["log_p"])
        return {**others, TAUGHT_IDS: top["ids"].astype(np.int32), TAUGHT_LOG_P: log_p}


def record_dtype(top: int, vocab_size: int | None) -> np.dtype:
    """Returns the dtype of the record of a label."""
    assert vocab_size is not None
    return np.dtype([("ids", id_dtype(vocab_size), (top,)), ("log_p", "<f4", (top,))])


def write(
    folder: Path,
    facts: dict[str, Any],
    cfg: Config,
    corpus: Corpus,
    tokenizers: Tokenizers,
    compute: Callable[[Sequence[TokenIds]], Iterator[Top]],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Writes the distributions of all training examples, from where an earlier call was interrupted; returns the facts.

    Args:
        facts: `top`, `teacher` and `data` (`facts_of_data`).
        compute: yields the distributions of examples; the results may depend on all examples of a call.
        progress: called with numbers of examples that are complete.

    Raises:
        UserError: the folder holds other distributions or files, or there are more than 2^31 labels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_stored(folder):
        earlier = read_facts(folder)
        check_facts(folder, {**earlier, **earlier["data"]}, {**facts["data"], **facts})
        if earlier["labels"]:
            return earlier
    elif any(folder.iterdir()):
        raise UserError(f"{folder} contains files other than distributions: choose another --output")
    write_text(folder / FACTS, json.dumps({**facts, "labels": None}, indent=1) + "\n")
    reader, dtype = corpus.train, record_dtype(facts["top"], cfg.model.vocab_size)
    assert isinstance(reader, IndexedReader)
    convert, size = feature_converter(cfg, tokenizers), len(reader)
    pending, rows = LengthReader(reader, convert), RowReader(reader, convert, WHOLE_BATCH)
    with (folder / TOP).open("ab+") as top_file, (folder / ENDS).open("ab+") as ends_file:
        done, labels = _complete(top_file, ends_file, dtype)
        progress(done)
        for start in range(done, size, BLOCK):
            block = range(start, min(start + BLOCK, size))
            examples = pending(block)
            counts = dict.fromkeys(block, 0)
            for example, (log_p, ids) in zip(examples, compute(rows.ids(examples)), strict=True):
                records = np.empty(len(ids), dtype)
                records["ids"], records["log_p"] = ids, log_p
                top_file.write(records.tobytes())
                counts[example.position] += len(ids)
            top_file.flush()
            ends = labels + np.cumsum([*counts.values()])
            ends_file.write(ends.astype(END).tobytes())
            ends_file.flush()
            labels = int(ends[-1])
            if labels >= MAX_LABELS:
                raise UserError(f"{folder}: the data has more than {MAX_LABELS:,} labels: prepare it in several parts")
            progress(len(block))
    facts = {**facts, "labels": labels, "mass": _mean_mass(folder / TOP, dtype)}
    write_text(folder / FACTS, json.dumps(facts, indent=1) + "\n")
    return facts


def _complete(top_file: Any, ends_file: Any, dtype: np.dtype) -> tuple[int, int]:
    """Truncates the files after the last complete block; returns the numbers of its examples and labels."""
    ends_file.seek(0)
    raw = ends_file.read()
    ends = np.frombuffer(raw[: len(raw) // END.itemsize * END.itemsize], END)
    written = top_file.seek(0, 2) // dtype.itemsize
    blocks = [stop for stop in range(BLOCK, len(ends) + 1, BLOCK) if ends[stop - 1] <= written]
    done = blocks[-1] if blocks else 0
    labels = int(ends[done - 1]) if done else 0
    ends_file.truncate(done * END.itemsize)
    top_file.truncate(labels * dtype.itemsize)
    return done, labels


def _mean_mass(path: Path, dtype: np.dtype) -> float:
    top, total = np.memmap(path, dtype, mode="r"), 0.0
    for start in range(0, len(top), AT_ONCE):
        total += float(np.exp(top["log_p"][start : start + AT_ONCE], dtype=np.float64).sum())
    return total / len(top)
