"""Corpora made from CLDR's locale data with Babel: seeded, endless, and needing neither file nor network."""

import dataclasses
import functools
import platform
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import babel

from tformer_jax import user_cache
from tformer_jax.config import DataConfig
from tformer_jax.data.corpora import cldr_phrases, heldout
from tformer_jax.data.corpora.cldr_phrases import PhraseBook
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example

ENDLESS = 2**31
"""Length of an endless split; grain shuffles no longer ones."""

Candidate = tuple[str, Callable[[], Example | None]]
"""The text that decides the split of a phrase, and what makes the example, or None where the phrase does not serve."""

LETTERS_TO_RECOGNISE = 4
"""Letters that a phrase needs before its language counts as recognisable."""


def is_endless(split: object) -> bool:
    """Whether a training split is made anew with every example."""
    return isinstance(split, Phrases)


def translation(cfg: DataConfig, seed: int) -> Corpus:
    """Phrases of `cfg.source_language` with their counterparts in `cfg.target_language`."""
    return _corpus(Translations(_locales(cfg.source_language, cfg.target_language), "train", seed), cfg)


def language(cfg: DataConfig, seed: int) -> Corpus:
    """Phrases labelled with the one of `cfg.languages` that they are written in."""
    return _corpus(Languages(_locales(*cfg.languages), "train", seed), cfg, labels=cfg.languages)


@dataclasses.dataclass(frozen=True)
class Phrases(Sequence[Example]):
    """An endless random-access split: example i is a function of (seed, i) alone."""

    locales: tuple[str, ...]
    split: str
    seed: int

    @functools.cached_property
    def book(self) -> PhraseBook:
        """The phrases that these locales share."""
        return _book(self.locales)

    def origin(self) -> dict[str, Any]:
        """All that the examples follow from, fit for JSON: equal origins give equal examples."""
        return {"kind": type(self).__name__, "split": self.split, "seed": self.seed, **_origin(self.locales)}

    def __getstate__(self) -> dict[str, object]:
        return {"locales": self.locales, "split": self.split, "seed": self.seed}

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index):
        if not 0 <= index < ENDLESS:
            raise IndexError(index)
        return next(self.examples(index, {self.split}))[1]

    def examples(self, index: int, splits: set[str]) -> Iterator[tuple[str, Example]]:
        """Each of `splits` with its example at `index`, in the order in which they are found."""
        draw, wanted = random.Random(f"{self.seed} {index}"), set(splits)
        while wanted:
            text, make = self.candidate(draw)
            split = heldout.split_of(text)
            if split in wanted and (example := make()) is not None:
                wanted.remove(split)
                yield split, example

    def candidate(self, draw: random.Random) -> Candidate:
        """The next phrase."""
        raise NotImplementedError


class Translations(Phrases):
    """The same phrase in two locales."""

    def candidate(self, draw: random.Random) -> Candidate:
        """A phrase that means one thing only: the source as it is typed, the target as CLDR sets it."""
        phrase = self.book.phrase(draw)
        source = typed(phrase[0])
        return source, lambda: {"source": source, "target": phrase[1]}


class Languages(Phrases):
    """A phrase in one of several locales."""

    def candidate(self, draw: random.Random) -> Candidate:
        """A phrase with letters that no other of the locales writes in the same way."""
        phrase = self.book.phrase(draw)
        chosen = draw.randrange(len(phrase))
        text = typed(phrase[chosen])

        def make() -> Example | None:
            recognisable = sum(map(str.isalpha, text)) >= LETTERS_TO_RECOGNISE or not text.isascii()
            if not recognisable or sum(typed(other) == text for other in phrase) > 1:
                return None
            return {"text": text, "label": self.locales[chosen]}

        return text, make


@functools.lru_cache(maxsize=8)
def _book(locales: tuple[str, ...]) -> PhraseBook:
    def kinds() -> Any:
        return PhraseBook(locales).admitted

    return PhraseBook(locales, user_cache.cached("phrase_books", _origin(locales), kinds))


def _origin(locales: tuple[str, ...]) -> dict[str, Any]:
    """All that the phrases of these locales follow from."""
    return {"locales": list(locales), "babel": babel.__version__, "python": platform.python_version(), "code": _code()}


@functools.cache
def _code() -> str:
    return user_cache.source_digest(sys.modules[__name__], cldr_phrases, heldout)


def typed(text: str) -> str:
    """The text with the one space that keyboards have, for CLDR's thin and unbreakable ones."""
    return re.sub(r"\s", " ", text)


def _corpus(train: Phrases, cfg: DataConfig, labels: tuple[str, ...] | None = None) -> Corpus:
    count = cfg.heldout_examples
    found = user_cache.cached("heldout", {**train.origin(), "count": count}, lambda: _held_out(train, count))
    return Corpus(train, found["validation"], found["test"], labels)


def _held_out(train: Phrases, count: int) -> dict[str, list[Example]]:
    """The first `count` distinct examples of each split that is held out."""
    found: dict[str, dict[str, Example]] = {"validation": {}, "test": {}}
    for index in range(100 * count):
        missing = {split for split, examples in found.items() if len(examples) < count}
        if not missing:
            break
        for split, example in train.examples(index, missing):
            found[split].setdefault(example.get("source", example.get("text", "")), example)
    least = min(map(len, found.values()))
    if least < count:
        raise DataError(f"data.heldout_examples={count}: CLDR gives only {least} distinct phrases")
    return {split: list(examples.values()) for split, examples in found.items()}


def _locales(*names: str) -> tuple[str, ...]:
    for name in names:
        try:
            babel.Locale.parse(name)
        except (babel.UnknownLocaleError, ValueError):
            raise DataError(f"{name!r} is not a CLDR locale; write one such as 'en', 'de' or 'zh'") from None
    if len(set(names)) < len(names):
        raise DataError(f"the CLDR locales {', '.join(names)} must differ from each other")
    return names
