"""Tags that tell a model which entry of a mixture an example is from."""

import bisect
import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from typing import ClassVar

from tformer_jax.config import DataConfig
from tformer_jax.config.fields import setting
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import Example
from tformer_jax.data.corpora.corpus import PAIRS
from tformer_jax.data.transforms.base import Change, Training, check_marks, check_symbols


@dataclasses.dataclass(frozen=True)
class EntryTags(Transform):
    """Starts sources with a tag of their entry ("Tagged Back-Translation", 2019)."""

    examples: ClassVar[tuple[tuple[str, ...], ...]] = (PAIRS,)
    probability: float = setting(1.0, "probability with which a source is tagged", low=0, high=1)
    tags: tuple[str, ...] = setting((), "tag of each entry of data.train; '': none")
    held_out: str = setting("", "tag of the sources of other splits, and of inputs, that start with none; '': none")

    def check_fit(self, data: DataConfig) -> None:
        """Raises `ConfigError` if there is not one tag for each entry, which is a symbol."""
        if data.multilingual:
            raise self.error("tags", "cannot be used with many languages, whose examples are sorted by direction")
        if len(self.tags) != len(data.train) or not any(self.tags):
            raise self.error("tags", f"must have one text for each of the {len(data.train)} entries of data.train")
        if len(data.train) > 1 and not data.mixed and data.source != "prepared":
            raise self.error("tags", "needs data.weights or data.stages, which tell the examples of entries apart")
        if self.held_out and self.held_out not in self.tags:
            raise self.error("held_out", f"must be one of {tuple(filter(None, self.tags))}")
        check_symbols(self, "tags", self.tags, data)

    def prepare(self, training: Training) -> Change:
        check_marks(self, "tags", self.tags, training.tokenizers)
        return functools.partial(self._tag, tuple(itertools.accumulate(training.corpus.sizes)))

    def _tag(self, ends: Sequence[int], example: Example, rng: random.Random, index: int) -> Example:
        """Puts the tag of its entry before a source; `ends` are the indices where entries end."""
        return {**example, "source": self.tags[bisect.bisect_right(ends, index)] + example["source"]}

    @property
    def is_format(self) -> bool:
        return bool(self.held_out)

    def format_source(self, source: str) -> str:
        """Returns the source if it starts with one of the tags, else the source with `held_out` before it."""
        return source if source.startswith(tuple(filter(None, self.tags))) else self.held_out + source
