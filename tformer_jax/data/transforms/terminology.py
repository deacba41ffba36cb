"""Hints at translations of terms within sources, from a glossary."""

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tformer_jax.config import DataConfig
from tformer_jax.config.fields import setting
from tformer_jax.config.transforms import Transform
from tformer_jax.data.characters import LETTER, clean_whitespace, whole_words
from tformer_jax.data.corpora import DataError, Example
from tformer_jax.data.corpora.corpus import PAIRS
from tformer_jax.data.corpora.example import cleaned
from tformer_jax.data.corpora.lines import BadLines, numbered_lines
from tformer_jax.data.transforms.base import Change, Training, check_marks, check_symbols
from tformer_jax.data.transforms.texts import fixed_pattern

UNIT = re.compile(rf"{LETTER}+|\S")
"""Words, and other characters; terms begin and end with whole units."""


@dataclasses.dataclass(frozen=True)
class Terminology(Transform):
    """Writes the translation of a term after it, where the target has it ("Training Neural Machine Translation to Apply
    Terminology Constraints", 2019)."""

    examples: ClassVar[tuple[tuple[str, ...], ...]] = (PAIRS,)
    glossary: str = setting("", "file below the data folder: lines of a term and its translations, separated by tabs")
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
        check_marks(self, "marks", self.marks, training.tokenizers)
        terms = read_glossary(Path(training.corpus.root or "") / self.glossary)
        units = max(len(UNIT.findall(term)) for term in terms)
        fixed = fixed_pattern(training.tokenizers)
        return Hints(training.data, terms, units, self.rate, (self.marks[0], self.marks[1]), fixed)


@dataclasses.dataclass(frozen=True)
class Hints:
    """Writes hints into sources; `units` is the number of units of the longest term."""

    data: DataConfig
    terms: Mapping[str, Sequence[str]]
    units: int
    rate: float
    marks: tuple[str, str]
    fixed: re.Pattern[str] | None
    """Symbols and placeholders, which no hint cuts."""

    def __call__(self, example: Example, rng: random.Random, index: int) -> Example:
        example = cleaned(self.data, example)
        source, parts, end = example["source"], [], 0
        for stop, translations in self.matches(source):
            hint = next((text for text in translations if whole_words((text,)).search(example["target"])), "")
            if hint and rng.random() < self.rate:
                parts.append(f"{source[end:stop]} {self.marks[0]} {hint} {self.marks[1]}")
                end = stop
        return {**example, "source": "".join(parts) + source[end:]}

    def matches(self, source: str) -> Iterator[tuple[int, Sequence[str]]]:
        """Yields the end and the translations of each term in a source: the longest at each unit, from the left."""
        spans = [match.span() for match in UNIT.finditer(source)]
        fixed = [match.span() for match in self.fixed.finditer(source)] if self.fixed else []
        place = 0
        while place < len(spans):
            start, ends = spans[place][0], [stop for _, stop in spans[place : place + self.units]]
            sizes = (n for n in range(len(ends), 0, -1) if source[start : ends[n - 1]] in self.terms)
            size = next((n for n in sizes if not cuts_span(start, ends[n - 1], fixed)), 0)
            if size:
                yield ends[size - 1], self.terms[source[start : ends[size - 1]]]
            place += max(size, 1)


def cuts_span(start: int, stop: int, fixed: Sequence[tuple[int, int]]) -> bool:
    """Returns whether a term has some characters of a span, but not all."""
    return any(first < stop and start < end and (first < start or stop < end) for first, end in fixed)


def read_glossary(path: Path) -> dict[str, tuple[str, ...]]:
    """Returns the translations of each term of a glossary, from all lines with it, after `clean_whitespace`.

    Raises:
        DataError: the file is missing or empty, or a line has no term or no translation.
    """
    terms: dict[str, tuple[str, ...]] = {}
    for number, line in numbered_lines(path, BadLines()):
        if line is None or not line.strip():
            continue
        term, *others = map(clean_whitespace, line.split("\t"))
        translations = tuple(filter(None, others))
        if not term or not translations:
            raise DataError(f"line {number} of glossary {path} must be a term, a tab and its translation: {line!r}")
        terms[term] = tuple(dict.fromkeys((*terms.get(term, ()), *translations)))
    return terms
