"""Token ids of several examples in one array, so that operations are vectorized over examples."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Column(NamedTuple):
    """The token ids of several examples under one key."""

    ids: np.ndarray
    """int32 [tokens], the concatenated ids of all examples."""
    lengths: np.ndarray
    """int [examples], the number of ids of each."""

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> "Column":
        """Concatenates rows of ids."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.concatenate([np.zeros(0, np.int32), *rows], dtype=np.int32, casting="unsafe"), lengths)

    def rows(self) -> list[np.ndarray]:
        """Returns the ids of each example: int32 [length] each."""
        stops = np.cumsum(self.lengths).tolist()
        return [self.ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    def truncate(self, limit: int | np.ndarray) -> "Column":
        """Truncates each example to its first `limit` ids, a number or one per example."""
        if not (self.lengths > limit).any():
            return self
        starts = np.cumsum(self.lengths) - self.lengths
        offsets = np.arange(len(self.ids)) - np.repeat(starts, self.lengths)
        limits = np.broadcast_to(limit, self.lengths.shape)
        return Column(self.ids[offsets < np.repeat(limits, self.lengths)], np.minimum(self.lengths, limits))

    def select(self, chosen: np.ndarray) -> "Column":
        """Returns the examples where `chosen`, bool [examples], is True."""
        return Column(self.ids[np.repeat(chosen, self.lengths)], self.lengths[chosen])

    def append(self, token: int | np.ndarray) -> "Column":
        """Appends a token, or one for each example (int [examples]), to each example."""
        return Column(np.insert(self.ids, np.cumsum(self.lengths), token), self.lengths + 1)

    def prepend(self, token: int | np.ndarray) -> "Column":
        """Prepends a token, or one for each example (int [examples]), to each example."""
        return Column(np.insert(self.ids, np.cumsum(self.lengths) - self.lengths, token), self.lengths + 1)

    def surround(self, before: Sequence[int | np.ndarray], after: Sequence[int | np.ndarray] = ()) -> "Column":
        """Puts each example between the tokens `before` and `after`, as in `prepend` and `append`."""
        column = self
        for token in reversed(before):
            column = column.prepend(token)
        for token in after:
            column = column.append(token)
        return column

    def shift_left(self, token: int) -> "Column":
        """Replaces each id by the next one of its example, and the last by `token`."""
        following = np.append(self.ids[1:], np.int32(token))
        following[np.cumsum(self.lengths[self.lengths > 0]) - 1] = token
        return Column(following, self.lengths)

    def split(self, limit: int) -> "Column":
        """Splits examples into pieces of at most `limit` ids; empty examples are dropped."""
        pieces = -(-self.lengths // limit)
        lengths = np.full(pieces.sum(), limit, np.int64)
        last = np.cumsum(pieces)[pieces > 0] - 1
        lengths[last] = (self.lengths - limit * (pieces - 1))[pieces > 0]
        return Column(self.ids, lengths)


Block = dict[str, Column]
"""Several examples: one column per key."""
TokenIds = dict[str, np.ndarray]
"""One example: ids by key, int32 [tokens]; a class label is an array of one element."""


def join_examples(examples: Sequence[TokenIds]) -> Block:
    """Concatenates examples into a block."""
    return {key: Column.from_rows([example[key] for example in examples]) for key in (examples[0] if examples else ())}


def split_examples(block: Block) -> list[TokenIds]:
    """Splits a block into its examples."""
    rows: Iterable[tuple[np.ndarray, ...]] = zip(*(Column(*column).rows() for column in block.values()), strict=True)
    return [dict(zip(block, row, strict=True)) for row in rows]


TAUGHT = "taught"
"""Key of the places of labels among the distributions of a teacher (`distributions.py`)."""
TAUGHT_IDS, TAUGHT_LOG_P = "taught_ids", "taught_log_p"
"""Keys of these distributions in a batch."""


class PendingExample(NamedTuple):
    """An example that waits for its batch: its lengths, and its ids or where to read them."""

    lengths: dict[str, int]
    """Number of ids by key."""
    ids: TokenIds | None
    """None: read when the batch is made."""
    position: int = 0
    """Its index in the split."""
    piece: int = 0
    """Which piece of the document it is."""


class PendingExamples(tuple[PendingExample, ...]):
    """An immutable snapshot of examples, which copies of a state share."""

    def __deepcopy__(self, memo: Any) -> "PendingExamples":
        return self

    @classmethod
    def restored(cls, examples: Iterable[Sequence[Any]]) -> "PendingExamples":
        """Restores a snapshot, or the output of `jsonable` for one."""
        return cls(
            PendingExample(lengths, ids and {key: np.asarray(row, np.int32) for key, row in ids.items()}, *rest)
            for lengths, ids, *rest in examples
        )


def with_ids(examples: Iterable[TokenIds]) -> list[PendingExample]:
    """Returns examples whose ids are known."""
    return [PendingExample({key: len(ids) for key, ids in example.items()}, example) for example in examples]


def split_block(block: Block) -> list[PendingExample]:
    """Returns the examples of a block."""
    return with_ids(split_examples(block))


def jsonable(state: Any) -> Any:
    """Converts an iterator's state to lists, dictionaries, strings and numbers."""
    if isinstance(state, dict):
        return {key: jsonable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [jsonable(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state
