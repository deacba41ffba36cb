"""Examples that are assigned to batches but not yet yielded, as a part of an iterator's state."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer_jax.data.columns import Block, TokenIds, split_examples

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
        return cls(PendingExample(lengths, _arrays(ids), *rest) for lengths, ids, *rest in examples)


def with_ids(examples: Iterable[TokenIds]) -> list[PendingExample]:
    """Returns examples whose ids are known."""
    return [PendingExample({key: len(ids) for key, ids in example.items()}, example) for example in examples]


def split_block(block: Block) -> list[PendingExample]:
    """Returns the examples of a block."""
    return with_ids(split_examples(block))


def _arrays(ids: Any) -> Any:
    return ids and {key: np.asarray(values, np.int32) for key, values in ids.items()}


def jsonable(state: Any) -> Any:
    """Converts an iterator's state to lists, dictionaries, strings and numbers."""
    if isinstance(state, dict):
        return {key: jsonable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [jsonable(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state
