"""Several examples in one: long inputs, and successive sentences of a document."""

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
from tformer_jax.data.corpora.corpus import PAIRS, TEXTS
from tformer_jax.data.transforms.base import Change, Training, check_marks, check_symbols
from tformer_jax.data.transforms.texts import SIDES


@dataclasses.dataclass(frozen=True)
class Concatenation(Transform):
    """Appends other examples of the same entry of a mixture, or direction, to both sides ("Neural Machine Translation
    with Extended Context", 2017)."""

    examples: ClassVar[tuple[tuple[str, ...], ...]] = (PAIRS, TEXTS)
    count: int = setting(2, "maximum number of examples in one; the number is drawn, from 2 on", low=2)
    separator: str = setting(" ", "text between them, such as ' <br> ' with data.symbols=('<br>',)")
    others: str = setting(
        "next",
        "next: the next examples of the data, as in documents, also in the next file or after a blank line; random",
        choices=("next", "random"),
    )
    max_characters: int = setting(1000, "maximum number of characters of a side; more are not appended", low=1)

    def check_fit(self, data: DataConfig) -> None:
        """Raises `ConfigError` if the separator is no symbol."""
        check_symbols(self, "separator", (self.separator,), data)

    @property
    def documents(self) -> tuple[int, str] | None:
        return (self.count, self.separator) if self.others == "next" else None

    def prepare(self, training: Training) -> Change:
        check_marks(self, "separator", (self.separator,), training.tokenizers)
        return functools.partial(self._join, training.corpus.train, tuple(itertools.accumulate(training.corpus.sizes)))

    def _join(
        self, examples: Sequence[Example], ends: Sequence[int], example: Example, rng: random.Random, index: int
    ) -> Example:
        """Appends examples of the same part of a split, whose parts end at `ends`."""
        part = bisect.bisect_right(ends, index)
        start, stop = ends[part - 1] if part else 0, ends[part]
        texts = {key: text for key, text in example.items() if key in (*SIDES, "text")}
        for number in range(1, rng.randint(2, self.count)):
            place = index + number if self.others == "next" else rng.randrange(start, stop)
            if place >= stop:
                break
            other = examples[place]
            joined = {key: text + self.separator + other[key] for key, text in texts.items()}
            if max(map(len, joined.values())) > self.max_characters:
                break
            texts = joined
        return {**example, **texts}
