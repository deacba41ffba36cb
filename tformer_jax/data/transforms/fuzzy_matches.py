"""Translations of similar sources of the training data in front of sources."""

import collections
import dataclasses
import functools
import random
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tformer_jax.config import DataConfig
from tformer_jax.config.fields import setting
from tformer_jax.config.transforms import Transform
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.data.corpora import Example
from tformer_jax.data.corpora.corpus import PAIRS, spread
from tformer_jax.data.transforms.base import Change, Training, check_marks, check_symbols

WORD = re.compile(r"\w+|[^\w\s]")


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
        check_marks(self, "separator", (self.separator,), training.tokenizers)
        train = training.corpus.train
        return functools.partial(self._add_match, Matches(train, spread(len(train), self.searched), self.similarity))

    def _add_match(self, matches: "Matches", example: Example, rng: random.Random, index: int) -> Example:
        match = matches.find(index)
        return example if match is None else {**example, "source": match + self.separator + example["source"]}


class Matches:
    """Finds the pair with the most similar source: by Dice's coefficient of the sets of words, the first of several.

    Sources that differ only in white space and invisible characters are equal.
    """

    def __init__(self, examples: Sequence[Example], searched: Sequence[int], threshold: float):
        self._examples, self._searched, self._threshold = examples, searched, threshold
        sources = [clean_whitespace(examples[index]["source"]) for index in searched]
        words = list(map(_words_of, sources))
        places = collections.defaultdict[str, list[int]](list)
        for place, of_source in enumerate(words):
            for word in of_source:
                places[word].append(place)
        self._places = {word: np.array(of_word, np.int32) for word, of_word in places.items()}
        self._sizes = np.array(list(map(len, words)))
        self._number_of = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        self._numbers = np.array([self._number_of[source] for source in sources])
        self._found: dict[int, str | None] = {}

    def find(self, index: int) -> str | None:
        """Returns the match of an example; None if no other source is similar enough."""
        if index not in self._found:
            self._found[index] = self._find(clean_whitespace(self._examples[index]["source"]))
        return self._found[index]

    def _find(self, source: str) -> str | None:
        words = _words_of(source)
        places = [self._places[word] for word in words if word in self._places]
        if not places:
            return None
        shared = np.bincount(np.concatenate(places), minlength=len(self._sizes))
        scores = 2 * shared / (len(words) + self._sizes)
        scores[self._numbers == self._number_of.get(source, -1)] = 0
        best = int(scores.argmax())
        return self._examples[self._searched[best]]["target"] if scores[best] >= self._threshold else None


def _words_of(text: str) -> frozenset[str]:
    return frozenset(WORD.findall(text.lower()))
