"""What a corpus is."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from tformer_jax.config import ConfigError

Example = Mapping[str, str]
"""{"source", "target"} for translation, {"text"} for language models, {"text", "label"} for classification."""

KEYS = {"seq2seq": ("source", "target"), "decoder_lm": ("text",), "classifier": ("text", "label")}
"""The keys of an example, by the family of the model."""


class DataError(ConfigError):
    """A corpus cannot be read; the message says which file and line, and what to do."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three splits with random access, and the names of the labels where there are any."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    labels: tuple[str, ...] | None = None
    tokenizers: Path | None = None
    """The folder of the tokenizers, where the corpus has been prepared with some."""


class Joined(Sequence[Any]):
    """Parts one after another, which stay where they are; `sizes` tells them apart."""

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
        part, inside = self.locate(range(len(self))[index])
        return self.parts[part][inside]

    def locate(self, index: int) -> tuple[int, int]:
        """The part that holds element `index`, and its place there."""
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part] - self.sizes[part])


class Part(Sequence[Any]):
    """The elements `start` to `stop` of another sequence, which stay where they are."""

    def __init__(self, whole: Sequence[Any], start: int, stop: int):
        self.whole, self.range = whole, range(start, stop)

    def __len__(self) -> int:
        return len(self.range)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.whole[i] for i in self.range[index]]
        return self.whole[self.range[index]]
