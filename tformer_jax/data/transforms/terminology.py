"""Hints at translations of terms within sources, from a glossary."""

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from tformer_jax.config import DataConfig
from tformer_jax.config.fields import setting
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import DataError, Example
from tformer_jax.data.corpora.corpus import PAIRS
from tformer_jax.data.corpora.lines import BadLines, numbered_lines
from tformer_jax.data.transforms.base import Change, Training, check_symbols

WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class Terminology(Transform):
    """Writes the translation of a term after it, where the target has it ("Training Neural Machine Translation to Apply
    Terminology Constraints", 2019)."""

    examples: ClassVar[tuple[tuple[str, ...], ...]] = (PAIRS,)
    glossary: str = setting("", "file below the data folder: lines of a term, a tab and its translation")
    rate: float = setting(0.5, "probability with which a term gets its hint", low=0, high=1)
    marks: tuple[str, ...] = setting(("<hint>", "</hint>"), "texts before and after a hint, symbols of the vocabulary")

    @property
    def files(self) -> tuple[str, ...]:
        return (self.glossary,)

    def check_fit(self, data: DataConfig) -> None:
        """Raises `ConfigError` without a glossary, or two marks that are symbols; or with many languages."""
        if not self.glossary:
            raise self.error("glossary", "must name a file below the data folder, such as 'terms.tsv'")
        if data.multilingual:
            raise self.error("glossary", "is of one direction, and the data has many languages")
        if len(self.marks) != 2:
            raise self.error("marks", "must be two texts, such as ('<hint>', '</hint>')")
        check_symbols(self, "marks", self.marks, data)

    def prepare(self, training: Training) -> Change:
        """Returns the change of sources.

        Raises:
            DataError: the glossary is missing or malformed.
        """
        terms = read_glossary(Path(training.corpus.root or "") / self.glossary)
        return Hints(terms, max(len(WORD.findall(term)) for term in terms), self.rate, (self.marks[0], self.marks[1]))


@dataclasses.dataclass(frozen=True)
class Hints:
    """Writes hints into sources; `words` is the number of words of the longest term."""

    terms: Mapping[str, str]
    words: int
    rate: float
    marks: tuple[str, str]

    def __call__(self, example: Example, rng: random.Random, index: int) -> Example:
        source, parts, end = example["source"], [], 0
        for stop, translation in self.matches(source):
            if translation in example["target"] and rng.random() < self.rate:
                parts.append(f"{source[end:stop]} {self.marks[0]} {translation} {self.marks[1]}")
                end = stop
        return {**example, "source": "".join(parts) + source[end:]}

    def matches(self, source: str) -> Iterator[tuple[int, str]]:
        """Yields the end and the translation of each term in a source: the longest at each word, from the left.

        Terms start and end with whole words.
        """
        spans = [match.span() for match in WORD.finditer(source)]
        place = 0
        while place < len(spans):
            ends = [stop for _, stop in spans[place : place + self.words]]
            terms = (source[spans[place][0] : stop] for stop in reversed(ends))
            size = next((len(ends) - number for number, term in enumerate(terms) if term in self.terms), 0)
            if size:
                yield ends[size - 1], self.terms[source[spans[place][0] : ends[size - 1]]]
            place += max(size, 1)


def read_glossary(path: Path) -> dict[str, str]:
    """Returns the translations of a glossary by term.

    Raises:
        DataError: the file is missing or empty, or a line has no term, translation, or a word.
    """
    terms: dict[str, str] = {}
    for number, line in numbered_lines(path, BadLines()):
        if line is None or not line.strip():
            continue
        term, _, translation = map(str.strip, line.partition("\t"))
        if not WORD.search(term) or not translation:
            raise DataError(f"line {number} of glossary {path} must be a term, a tab and its translation: {line!r}")
        terms.setdefault(term, translation)
    return terms
