"""Examples that an iterator has read but not yet emitted, as a part of its state."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tformer_jax.data.columns import Tokens


class PendingExamples(tuple[Tokens, ...]):
    """An immutable snapshot of examples, which copies of a state share."""

    def __deepcopy__(self, memo: Any) -> "PendingExamples":
        return self

    @classmethod
    def restored(cls, examples: Iterable[dict[str, Any]]) -> "PendingExamples":
        """Restores a snapshot, or the output of `jsonable` for one."""
        return cls({key: np.asarray(ids, np.int32) for key, ids in example.items()} for example in examples)


def jsonable(state: Any) -> Any:
    """Converts an iterator's state to lists, dictionaries, strings and numbers."""
    if isinstance(state, dict):
        return {key: jsonable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [jsonable(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state
