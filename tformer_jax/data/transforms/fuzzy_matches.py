"""Translations of similar sources of the training data in front of sources."""

import collections
import dataclasses
import functools
import math
import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from tformer_jax.config import DataConfig
from tformer_jax.config.fields import setting
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import Example
from tformer_jax.data.corpora.corpus import PAIRS, spread
from tformer_jax.data.transforms.base import Change, Training, check_symbols

WORD = re.compile(r"\w+|[^\w\s]")
CACHED = 2**20
"""Number of examples whose matches are remembered."""
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class FuzzyMatches(Transform):
    """Puts the target of the most similar other source, if any, in front of a source ("Neural Fuzzy Repair", 2019)."""

    examples: ClassVar[tuple[tuple[str, ...], ...]] = (PAIRS,)
    probability: float = setting(0.5, "probability with which a source gets its match", low=0, high=1)
    similarity: float = setting(
        0.5, "minimum similarity: twice the number of common words by the number of words of both", above=0, high=1
    )
    separator: str = setting(" <match> ", "text between the match and the source, a symbol of the vocabulary")
    searched: int = setting(100_000, "maximum number of training examples that are searched, evenly spread", low=1)

    def check_fit(self, data: DataConfig) -> None:
        """Raises `ConfigError` if the separator is no symbol, or with many languages."""
        if data.multilingual:
            raise self.error("kind", "cannot be used with many languages, whose targets differ in language")
        if data.generated:
            raise self.error("kind", f"searches examples that are read; data.source={data.source!r} generates them")
        check_symbols(self, "separator", (self.separator,), data)

    def prepare(self, training: Training) -> Change:
        """Returns the change of sources."""
        train = training.corpus.train
        return MatchedSources(Matches(train, spread(len(train), self.searched), self.similarity), self.separator)


@dataclasses.dataclass(frozen=True)
class MatchedSources:
    """Puts the match of each example of a split in front of its source."""

    matches: "Matches"
    separator: str

    def __call__(self, example: Example, rng: random.Random, index: int) -> Example:
        match = self.matches.find(index)
        return example if match is None else {**example, "source": match + self.separator + example["source"]}


class Matches:
    """Finds the pair with the most similar source; the first of several.

    Similarity is Dice's coefficient of the sets of words. Sources of at least the threshold share one of their rarest
    words, so that only those are compared (prefix filtering, "A Primitive Operator for Similarity Joins ...", 2006).
    """

    def __init__(self, examples: Sequence[Example], searched: Sequence[int], threshold: float):
        self._examples, self._searched, self._threshold = examples, searched, threshold
        self._words = {index: _words_of(examples[index]["source"]) for index in searched}
        self._places: dict[str, list[int]] = collections.defaultdict(list)
        for index, words in self._words.items():
            for word in words:
                self._places[word].append(index)
        self.find = functools.lru_cache(CACHED)(self._find)
        """Returns the match of an example by its index; None if no other source is similar enough."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Matches, (self._examples, self._searched, self._threshold)

    def _find(self, index: int) -> str | None:
        source = self._examples[index]["source"]
        words = _words_of(source)
        rarest = sorted(words, key=lambda word: (len(self._places.get(word, ())), word))
        least = math.ceil(self._threshold * len(words) / (2 - self._threshold) - ROUNDING)
        alike = {place for word in rarest[: len(words) - least + 1] for place in self._places.get(word, ())}
        best, match = self._threshold, None
        for place in sorted(alike):
            others = self._words[place]
            score = 2 * len(words & others) / (len(words) + len(others))
            if (score > best or (match is None and score == best)) and self._examples[place]["source"] != source:
                best, match = score, self._examples[place]["target"]
        return match


def _words_of(text: str) -> frozenset[str]:
    return frozenset(WORD.findall(text.lower()))
