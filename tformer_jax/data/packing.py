"""Packing: several whole examples in one row, told apart by their segment numbers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from tformer_jax.data.bucketing import LABELS
from tformer_jax.data.transforms import Tokens
from tformer_jax.data.waiting import Waiting
from tformer_jax.special_tokens import IGNORED, PAD

SEGMENTS = {"source": "source_segments", "target_in": "target_segments", "tokens": "segments"}
"""The key of the segment numbers, by the key of the tokens: 1, 2, ... in a row, 0 for padding."""
OWNER = {"target_out": "target_in", "targets": "tokens"}
"""The tokens that labels belong to."""
POOL = 1024
"""Examples that wait; the next one that fits a row is looked for among them."""
CAREFUL = 3
"""The last places of a row, in examples of mean length, are filled by search instead of in order."""


def choose_row(lengths: np.ndarray, capacity: np.ndarray) -> list[int]:
    """Which of the waiting examples fill a row: the oldest, then those that leave the least room.

    The first examples of a row are taken in order. Towards its end, the search prefers an example that fills the row
    on all sides; then one that leaves exactly the room of another; then one that fills the sides evenly.

    Args:
        lengths: int [examples, sides], oldest first; at least one example fits the capacity.
        capacity: int [sides].
    """
    ordered = np.cumsum(lengths, axis=0)
    careful_below = capacity - CAREFUL * np.maximum(lengths.mean(axis=0), 1)
    count = max(int((ordered <= careful_below).all(axis=1).sum()), 1)
    chosen = list(range(count))
    remaining = capacity - ordered[count - 1]
    free = np.arange(len(lengths)) >= count
    of_size = np.zeros(tuple(lengths.max(axis=0) + 1), bool)
    of_size[tuple(lengths[free].T)] = True
    largest = lengths.max(axis=0)
    while True:
        candidates = np.flatnonzero(free & (lengths <= remaining).all(axis=1))
        if not len(candidates):
            return chosen
        left = remaining - lengths[candidates]
        exact = ~left.any(axis=1)
        if exact.any():
            best = int(exact.argmax())
        else:
            completable = (left <= largest).all(axis=1) & of_size[tuple(np.minimum(left, largest).T)]
            shares = left / capacity
            unevenness = shares.max(axis=1) - shares.min(axis=1)
            best = int(completable.argmax()) if completable.any() else int(unevenness.argmin())
        place = int(candidates[best])
        chosen.append(place)
        free[place] = False
        remaining = left[best]


def pack_rows(rows: Sequence[Sequence[Tokens]], count: int, capacity: dict[str, int]) -> dict[str, np.ndarray]:
    """Writes the examples of each row side by side: int32 [count, length], with the segments of `SEGMENTS`.

    Labels have the length of the tokens they belong to; missing rows are padding.
    """
    batch = {}
    for key in rows[0][0]:
        length = capacity[OWNER.get(key, key)]
        batch[key] = np.full((count, length), IGNORED if key in LABELS else PAD, np.int32)
    for side in capacity:
        batch[SEGMENTS[side]] = np.zeros((count, capacity[side]), np.int32)
    for number, row in enumerate(rows):
        starts = dict.fromkeys(rows[0][0], 0)
        for segment, example in enumerate(row, start=1):
            for key, ids in example.items():
                start, stop = starts[key], starts[key] + len(ids)
                batch[key][number, start:stop] = ids
                if key in SEGMENTS:
                    batch[SEGMENTS[key]][number, start:stop] = segment
                starts[key] = stop
    return batch


class Pool:
    """Examples that wait for a row, oldest first."""

    def __init__(self, capacity: dict[str, int], examples: Iterable[Tokens] = ()):
        self._sides = list(capacity)
        self._capacity = np.array(list(capacity.values()))
        self.examples = list(examples)
        self._lengths = [self._length(example) for example in self.examples]

    def fill(self, more: Iterator[Tokens]) -> None:
        """Takes examples until enough wait, or there are no more."""
        while len(self.examples) < POOL and (example := next(more, None)) is not None:
            self.examples.append(example)
            self._lengths.append(self._length(example))

    def take_row(self) -> list[Tokens]:
        """Removes the examples of one row."""
        chosen = choose_row(np.array(self._lengths), self._capacity)
        row = [self.examples[place] for place in chosen]
        for place in sorted(chosen, reverse=True):
            del self.examples[place], self._lengths[place]
        return row

    def _length(self, example: Tokens) -> tuple[int, ...]:
        return tuple(len(example[side]) for side in self._sides)


class PackedBatches(grain.IterDataset):
    """Packs the examples of a parent dataset into rows and emits batches of `rows`; no example is lost.

    Each side of `capacity` (tokens by key) holds every single example.
    """

    def __init__(self, parent: grain.IterDataset, rows: int, capacity: dict[str, int]):
        super().__init__(parent)
        self._rows, self._capacity = rows, capacity

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self._parent.__iter__(), self._rows, self._capacity)


class PackedIterator(grain.DatasetIterator):
    """Iterator of `PackedBatches`; its state is the parent's state and the waiting examples."""

    def __init__(self, parent: grain.DatasetIterator, rows: int, capacity: dict[str, int]):
        super().__init__(parent)
        self._rows, self._capacity = rows, capacity
        self._pool = Pool(capacity)

    def __next__(self) -> dict[str, np.ndarray]:
        rows = []
        for _ in range(self._rows):
            self._pool.fill(self._parent)
            rows.append(self._pool.take_row())
        return pack_rows(rows, self._rows, self._capacity)

    def get_state(self) -> dict[str, Any]:
        """Taken between two batches; `waiting.jsonable` makes it fit for JSON."""
        return {"parent": self._parent.get_state(), "waiting": Waiting(self._pool.examples)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with exactly the batches that followed `get_state`."""
        self._parent.set_state(state["parent"])
        self._pool = Pool(self._capacity, Waiting.restored(state["waiting"]))


def packed_once(examples: Iterable[Tokens], rows: int, capacity: dict[str, int]) -> Iterator[dict[str, np.ndarray]]:
    """Batches of every example once; the last rows may be padding."""
    rest, pool, ready = iter(examples), Pool(capacity), []
    pool.fill(rest)
    while pool.examples:
        ready.append(pool.take_row())
        pool.fill(rest)
        if len(ready) == rows:
            yield pack_rows(ready, rows, capacity)
            ready = []
    if ready:
        yield pack_rows(ready, rows, capacity)
