"""Packing: several whole examples in one row, told apart by their segment numbers."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from tformer_jax.data.bucketing import LABELS
from tformer_jax.data.columns import Tokens, split_examples
from tformer_jax.data.waiting import Waiting
from tformer_jax.special_tokens import IGNORED, PAD

SEGMENTS = {"source": "source_segments", "target_in": "target_segments", "tokens": "segments"}
"""The key of the segment numbers, by the key of the tokens: 1, 2, ... in a row, 0 for padding."""
OWNER = {"target_out": "target_in", "targets": "tokens"}
"""The tokens that labels belong to."""
POOL = 512
"""Examples that wait; the next one that fits a row is looked for among them."""
CAREFUL = 3
"""The last places of a row, in examples of mean length, are filled by search instead of in order."""


def choose_row(lengths: np.ndarray, capacity: np.ndarray) -> list[int]:
    """Which of the waiting examples fill a row: the oldest, then those that leave the least room.

    The first examples of a row are taken in order. Towards its end, the search prefers an example that fills the row
    on all sides; then one that leaves exactly the room of another; then one that fills the sides evenly.

    Args:
        lengths: int [sides, examples], oldest first; at least one example fits the capacity.
        capacity: int [sides].
    """
    capacity = capacity[:, None]
    ordered = np.cumsum(lengths, axis=1)
    careful_below = capacity - CAREFUL * lengths.mean(axis=1, keepdims=True)
    count = max(int((ordered <= careful_below).all(axis=0).sum()), 1)
    chosen = list(range(count))
    remaining = capacity - ordered[:, count - 1 : count]
    places = np.arange(count, lengths.shape[1])
    largest = lengths.max(axis=1, keepdims=True)
    of_size = np.zeros(tuple(largest[:, 0] + 1), bool)
    of_size[tuple(lengths[:, count:])] = True
    while True:
        left = remaining - lengths[:, places]
        fits = (left >= 0).all(axis=0)
        places, left = places[fits], left[:, fits]
        if not len(places):
            return chosen
        total = left.sum(axis=0)
        best = int(total.argmin())
        if total[best]:
            completable = of_size[tuple(np.minimum(left, largest))] & (left <= largest).all(axis=0)
            shares = left / capacity
            unevenness = shares.max(axis=0) - shares.min(axis=0)
            best = int(completable.argmax()) if completable.any() else int(unevenness.argmin())
        chosen.append(int(places[best]))
        remaining = left[:, best : best + 1]
        places = np.delete(places, best)


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
        self._capacity = np.array(list(capacity.values()), np.int32)
        self.examples: list[Tokens] = []
        self._lengths = np.zeros((len(self._sides), 0), np.int32)
        self.add(examples)

    def add(self, examples: Iterable[Tokens]) -> None:
        """Lets more examples wait."""
        new = list(examples)
        lengths = np.array([[len(example[side]) for example in new] for side in self._sides], np.int32)
        self._lengths = np.concatenate([self._lengths, lengths], axis=1)
        self.examples += new

    def take_row(self) -> list[Tokens]:
        """Removes the examples of one row."""
        if (self._lengths[:, 0] == self._capacity).all():
            self._lengths = self._lengths[:, 1:]
            return [self.examples.pop(0)]
        chosen = choose_row(self._lengths[:, :POOL], self._capacity)
        row = [self.examples[place] for place in chosen]
        kept = np.ones(len(self.examples), bool)
        kept[chosen] = False
        self._lengths = self._lengths[:, kept]
        self.examples = list(itertools.compress(self.examples, kept.tolist()))
        return row


class PackedBatches(grain.IterDataset):
    """Packs the examples in a parent's blocks into rows and emits batches of `rows`; no example is lost.

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
            while len(self._pool.examples) < POOL:
                self._pool.add(split_examples(next(self._parent)))
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
    pool, ready = Pool(capacity, examples), []
    while pool.examples:
        ready.append(pool.take_row())
        if len(ready) == rows or not pool.examples:
            yield pack_rows(ready, rows, capacity)
            ready = []
