"""Examples that an iterator has read but not yet emitted, as a part of its state."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tformer_jax.data.columns import Tokens


class Waiting(tuple[Tokens, ...]):
    """A snapshot of examples. Nobody changes it, so that a copy of a state may share it."""

    def __deepcopy__(self, memo: Any) -> "Waiting":
        return self

    @classmethod
    def restored(cls, examples: Iterable[dict[str, Any]]) -> "Waiting":
        """A snapshot, or what `jsonable` made of one, as arrays again."""
        return cls({key: np.asarray(ids, np.int32) for key, ids in example.items()} for example in examples)


def jsonable(state: Any) -> Any:
    """An iterator's state as plain lists, dictionaries, texts and numbers."""
    if isinstance(state, dict):
        return {key: jsonable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [jsonable(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state
