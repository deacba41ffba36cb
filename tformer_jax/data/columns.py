"""Token ids of several examples side by side: what is done to them is done to all at once."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Column(NamedTuple):
    """The ids of one key of several examples."""

    ids: np.ndarray
    """int32 [tokens], of all examples one after another."""
    lengths: np.ndarray
    """int [examples], how many each has."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> "Column":
        """The column of some rows of ids."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.concatenate([np.zeros(0, np.int32), *rows], dtype=np.int32, casting="unsafe"), lengths)

    def rows(self) -> list[np.ndarray]:
        """The ids of each example."""
        stops = np.cumsum(self.lengths).tolist()
        return [self.ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    def cut(self, limit: int) -> "Column":
        """At most `limit` ids of each example, from its beginning."""
        if not (self.lengths > limit).any():
            return self
        starts = np.cumsum(self.lengths) - self.lengths
        places = np.arange(len(self.ids)) - np.repeat(starts, self.lengths)
        return Column(self.ids[places < limit], np.minimum(self.lengths, limit))

    def ended_by(self, token: int) -> "Column":
        """Each example with a token behind it."""
        lengths = self.lengths + 1
        return Column(self._insert(token, np.cumsum(lengths) - 1), lengths)

    def begun_by(self, token: int) -> "Column":
        """Each example with a token before it."""
        lengths = self.lengths + 1
        return Column(self._insert(token, np.cumsum(lengths) - lengths), lengths)

    def followed_by(self, token: int) -> "Column":
        """What comes after each id: the next one of its example, or the token at its end."""
        following = np.append(self.ids[1:], np.int32(token))
        following[np.cumsum(self.lengths[self.lengths > 0]) - 1] = token
        return Column(following, self.lengths)

    def in_pieces(self, limit: int) -> "Column":
        """The same ids as more examples, none longer than `limit`; empty ones vanish."""
        pieces = -(-self.lengths // limit)
        lengths = np.full(pieces.sum(), limit, np.int64)
        last = np.cumsum(pieces)[pieces > 0] - 1
        lengths[last] = (self.lengths - limit * (pieces - 1))[pieces > 0]
        return Column(self.ids, lengths)

    def _insert(self, token: int, places: np.ndarray) -> np.ndarray:
        result = np.full(len(self.ids) + len(places), token, np.int32)
        others = np.ones(len(result), bool)
        others[places] = False
        result[others] = self.ids
        return result


Block = dict[str, Column]
"""Several examples: a column for each key."""
Tokens = dict[str, np.ndarray]
"""One example: ids by key, int32 [tokens]; a class label is an array of one number."""


def join_examples(examples: Sequence[Tokens]) -> Block:
    """The examples as a block."""
    return {key: Column.of([example[key] for example in examples]) for key in (examples[0] if examples else ())}


def split_examples(block: Block) -> list[Tokens]:
    """The examples of a block."""
    rows: Iterable[tuple[np.ndarray, ...]] = zip(*(Column(*column).rows() for column in block.values()), strict=True)
    return [dict(zip(block, row, strict=True)) for row in rows]
