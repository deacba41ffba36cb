"""Packing: several whole examples in one row, separated by segment numbers."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from tformer_jax.config import Config
from tformer_jax.config.task import task_of
from tformer_jax.data.bucketing import LABELS, Buckets
from tformer_jax.data.columns import Column, PendingExample, PendingExamples, TokenIds
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.examples import ExampleBatches, TrainingExamples, evaluation_examples, training_examples
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.rows import Batching, EvaluationPass, RowReader, Shards, row_capacity
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.special_tokens import IGNORED, PAD

SEGMENTS = {"source": "source_segments", "target_in": "target_segments", "tokens": "segments"}
"""Keys of segment numbers by keys of tokens. Examples of a row are numbered from 1; padding is 0."""
OWNER = {"target_out": "target_in", "targets": "tokens"}
"""Keys of tokens by keys of their labels."""
POOL, SMALLEST_POOL = 512, 32
"""Number of pending examples to choose from, and its minimum."""
POOL_SHARE = 4
"""The pool has at most 1 / POOL_SHARE of all examples: short ones, which fill rows, are taken ahead of the others."""
SEARCH_SPAN = 2
"""Length of the end of a row that is filled by search instead of in order, in examples of mean length."""


class Packed(Batching):
    """Batches of rows that hold several whole examples each; pairs and labeled texts are evaluated in buckets."""

    @staticmethod
    def train_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> grain.IterDataset:
        examples = training_examples(cfg, corpus, tokenizers, shards)
        pool = min(POOL, max(sum(corpus.sizes) // POOL_SHARE, SMALLEST_POOL))
        pack = functools.partial(PackedIterator, rows=cfg.data.batch_size, capacity=row_capacity(cfg), pool=pool)
        return ExampleBatches(examples, lambda parent: pack(parent, examples))

    @staticmethod
    def evaluation_batches(cfg: Config, split: EvaluationPass) -> Iterator[Batch]:
        if not task_of(cfg).documents:
            return Buckets.evaluation_batches(cfg, split)
        examples, read = evaluation_examples(cfg, split)
        return packed_once(examples, split.rows, row_capacity(cfg), read)


def choose_row(lengths: np.ndarray, capacity: np.ndarray) -> list[int]:
    """Chooses the pending examples of a row: the oldest, then examples that leave the fewest tokens free.

    Most of a row is filled in order. Near its end, the search prefers an example that fills the row on all sides, then
    one that leaves exactly the length of another, then the oldest that fits.

    Args:
        lengths: int [sides, examples], each at least 1, oldest first; at least one example fits the capacity.
        capacity: int [sides].

    Returns:
        Indices of the examples, in their order in the row.
    """
    ordered = np.cumsum(lengths, axis=1)
    in_order_below = capacity - SEARCH_SPAN * ordered[:, -1] / lengths.shape[1]
    in_order = (int(side.searchsorted(limit, "right")) for side, limit in zip(ordered, in_order_below, strict=True))
    count = max(min(in_order), 1)
    search = _Search(lengths, count)
    free = capacity - ordered[:, count - 1]
    chosen = list(range(count))
    while (index := search.best(free)) is not None:
        chosen.append(index)
        free = free - lengths[:, index]
    return chosen


class _Search:
    """Finds pending examples, from index `start` on, that fill a free space of given lengths (source, target)."""

    def __init__(self, lengths: np.ndarray, start: int):
        self._lengths = lengths
        self._largest = lengths.max(axis=1, keepdims=True)
        self._exists = np.zeros(self._largest.ravel() + 1, bool)
        self._exists[tuple(lengths[:, start:])] = True
        self._unused = np.arange(lengths.shape[1]) >= start

    def best(self, free: np.ndarray) -> int | None:
        """Takes the best example for a free space, int [sides], and returns its index; None if none fits."""
        missing = free[:, None] - self._lengths
        index = self._take((missing == 0).all(axis=0))
        if index is None:
            inside = ((missing >= 0) & (missing <= self._largest)).all(axis=0)
            index = self._take(inside & self._exists[tuple(np.clip(missing, 0, self._largest))])
        return index if index is not None else self._take((missing >= 0).all(axis=0))

    def _take(self, candidates: "np.ndarray | np.bool") -> int | None:
        unused = self._unused & candidates
        first = int(unused.argmax())
        if not unused[first]:
            return None
        self._unused[first] = False
        return first


def pack_rows(
    rows: Sequence[Sequence[TokenIds]], capacity: dict[str, int], keys: Sequence[str]
) -> dict[str, np.ndarray]:
    """Lays the examples of each row end to end: int32 [rows, length] for each of `keys`, and the segment numbers.

    The keys of segment numbers are in `SEGMENTS`. Labels have the length of their tokens; a row without examples is
    padding.
    """
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    segments = np.concatenate([np.arange(1, len(row) + 1, dtype=np.int32) for row in rows])
    examples = list(itertools.chain.from_iterable(rows))
    batch = {}
    *_, last = capacity.values()  # of targets, and of `TAUGHT`
    for key in keys:
        column = Column.from_rows([example[key] for example in examples])
        length = capacity.get(OWNER.get(key, key), last)
        ends = np.cumsum(column.lengths)
        before_row = np.concatenate([[0], ends])[np.searchsorted(row_of, np.arange(len(rows)))]
        indices = np.arange(len(column.ids)) + np.repeat(
            (np.arange(len(rows)) * length - before_row)[row_of], column.lengths
        )
        batch[key] = np.full((len(rows), length), IGNORED if key in LABELS else PAD, np.int32)
        batch[key].ravel()[indices] = column.ids
        if key in SEGMENTS:
            batch[SEGMENTS[key]] = np.zeros((len(rows), length), np.int32)
            batch[SEGMENTS[key]].ravel()[indices] = np.repeat(segments, column.lengths)
    return batch


class Pool:
    """Pending examples, oldest first; a row is chosen from the first `size` of them."""

    def __init__(self, capacity: dict[str, int], examples: Iterable[PendingExample] = (), size: int = POOL):
        self._sides, self._size = list(capacity), size
        self._capacity = np.array(list(capacity.values()), np.int32)
        self.examples: list[PendingExample] = []
        self._lengths = np.zeros((len(self._sides), 0), np.int32)
        self.add(examples)

    def add(self, examples: Iterable[PendingExample]) -> None:
        """Appends examples."""
        new = list(examples)
        lengths = np.array([[example.lengths[side] for example in new] for side in self._sides], np.int32)
        self._lengths = np.concatenate([self._lengths, lengths], axis=1)
        self.examples += new

    def take_row(self) -> list[PendingExample]:
        """Removes and returns the examples of one row."""
        if (self._lengths[:, 0] == self._capacity).all():
            self._lengths = self._lengths[:, 1:]
            return [self.examples.pop(0)]
        chosen = choose_row(self._lengths[:, : self._size], self._capacity)
        row = [self.examples[index] for index in chosen]
        self._lengths = np.delete(self._lengths, chosen, axis=1)
        for index in sorted(chosen, reverse=True):
            del self.examples[index]
        return row


class PackedIterator(grain.DatasetIterator):
    """Packs a parent's pending examples into batches of `rows` rows and yields this process's.

    The examples of a row are chosen from `pool` pending ones. Each side of `capacity` (tokens by key) must hold every
    single example. Its state is the parent's state and the pending examples.
    """

    def __init__(
        self, parent: grain.DatasetIterator, examples: TrainingExamples, rows: int, capacity: dict[str, int], pool: int
    ):
        super().__init__(parent)
        self._rows, self._capacity, self._reader, self._stages = rows, capacity, examples.rows, examples.stages
        self._size, self._pool = pool, Pool(capacity, size=pool)

    def __next__(self) -> dict[str, np.ndarray]:
        rows = []
        for _ in range(self._rows):
            while len(self._pool.examples) < self._size:
                self._pool.add(next(self._parent))
            rows.append(self._pool.take_row())
        if self._stages is not None:
            self._stages.count_examples(itertools.chain.from_iterable(rows))
        return _own_rows(rows, self._capacity, self._reader)

    def get_state(self) -> dict[str, Any]:
        """Returns the state between two batches; `columns.jsonable` converts it to JSON."""
        return {"parent": self._parent.get_state(), "pending": PendingExamples(self._pool.examples)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the batches that followed `get_state`."""
        self._parent.set_state(state["parent"])
        self._pool = Pool(self._capacity, PendingExamples.restored(state["pending"]), self._size)


def packed_once(
    examples: Iterable[PendingExample], rows: int, capacity: dict[str, int], reader: RowReader
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this process's rows of batches that hold every example once; the last rows may be padding."""
    pool = Pool(capacity, examples)
    while pool.examples:
        yield _own_rows([pool.take_row() if pool.examples else [] for _ in range(rows)], capacity, reader)


def _own_rows(rows: list[list[PendingExample]], capacity: dict[str, int], reader: RowReader) -> dict[str, np.ndarray]:
    own = reader.shards.select(rows)
    ids = iter(reader.ids(list(itertools.chain.from_iterable(own))))
    packed = pack_rows([list(itertools.islice(ids, len(row))) for row in own], capacity, list(rows[0][0].lengths))
    return reader.complete(packed)
