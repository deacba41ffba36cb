"""Types of examples and corpora."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from tformer_jax.base.errors import UserError

Example = Mapping[str, str]
"""{"source", "target"} for translation, {"text"} for language models, {"text", "label"} for classification."""


class DataError(UserError):
    """A corpus cannot be read; the message names the file and line, and the fix."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three splits with random access; `labels` are the class names, if any."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    labels: tuple[str, ...] | None = None
    tokenizers: Path | None = None
    """Folder of the tokenizers of a prepared corpus."""
    left_out: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """Number of malformed lines and of examples that filters dropped, by split and reason."""


class Joined(Sequence[Any]):
    """Concatenation of sequences without copying them; `sizes` are their lengths."""

    def __init__(self, parts: Sequence[Any]):
        self.parts = parts
        self.sizes = [len(part) for part in parts]
        self._ends = list(itertools.accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part, offset = self.locate(range(len(self))[index])
        return self.parts[part][offset]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the number of the part that holds element `index`, and the index within that part."""
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part] - self.sizes[part])


def spread(size: int, limit: int = 0) -> Sequence[int]:
    """Returns at most `limit` (0: all) evenly spread indices of `size` elements, in order."""
    count = min(size, limit or size)
    return range(size) if count == size else [number * size // count for number in range(count)]


class Part(Sequence[Any]):
    """View of the elements `indices` of another sequence."""

    def __init__(self, parent: Sequence[Any], indices: Sequence[int]):
        self.parent, self.indices = parent, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.parent[i] for i in self.indices[index]]
        return self.parent[self.indices[index]]
