"""Corpora generated from CLDR's locale data with Babel: seeded, endless, without files or network."""

import dataclasses
import functools
import platform
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import babel

from tformer_jax.base import user_cache
from tformer_jax.config import Config, DataConfig
from tformer_jax.data.corpora import cldr_phrases, heldout
from tformer_jax.data.corpora.cldr_phrases import PhraseBook
from tformer_jax.data.corpora.corpus import LABELED, PAIRS, Corpus, DataError, Endless, Example, Source
from tformer_jax.data.languages import read_language

ENDLESS = 2**31
"""Length of an endless split: more examples than a run trains on, and within the 32 bits of grain's shuffle."""

Candidate = tuple[str, Callable[[], Example | None]]
"""The text that determines the split of a phrase, and a function that returns the example, or None to reject it."""

HELD_OUT_SEED = 0
"""Seed of the validation and test splits, whatever the seed of the run, so that runs can be compared."""
LETTERS_TO_RECOGNIZE = 4
"""Number of letters from which the language of an ASCII phrase counts as recognizable."""


@dataclasses.dataclass(frozen=True)
class Phrases(Endless):
    """An endless random-access split: example i is a function of (seed, i) alone."""

    locales: tuple[str, ...]
    split: str
    seed: int

    @functools.cached_property
    def book(self) -> PhraseBook:
        """The phrase book of these locales."""
        return _book(self.locales)

    def origin(self) -> dict[str, Any]:
        """Returns everything that the examples depend on, ready for JSON; equal origins give equal examples."""
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
        """Yields each of `splits` with its example at `index`, in the order in which they are found."""
        draw, wanted = random.Random(f"{self.seed} {index}"), set(splits)
        while wanted:
            text, make = self.candidate(draw)
            split = heldout.split_of(text)
            if split in wanted and (example := make()) is not None:
                wanted.remove(split)
                yield split, example

    def candidate(self, draw: random.Random) -> Candidate:
        """Draws the next phrase."""
        raise NotImplementedError


class Translations(Phrases):
    """The same phrase in two locales."""

    def candidate(self, draw: random.Random) -> Candidate:
        """Draws a phrase; the source has plain spaces, the target is exactly as CLDR formats it."""
        phrase = self.book.phrase(draw)
        source = typed(phrase[0])
        return source, lambda: {"source": source, "target": phrase[1]}


class Languages(Phrases):
    """A phrase in one of several locales."""

    def candidate(self, draw: random.Random) -> Candidate:
        """Draws a phrase, rejected if it has too few letters or another locale writes it in the same way."""
        phrase = self.book.phrase(draw)
        chosen = draw.randrange(len(phrase))
        text = typed(phrase[chosen])

        def make() -> Example | None:
            recognizable = sum(map(str.isalpha, text)) >= LETTERS_TO_RECOGNIZE or not text.isascii()
            if not recognizable or sum(typed(other) == text for other in phrase) > 1:
                return None
            return {"text": text, "label": self.locales[chosen]}

        return text, make


@functools.lru_cache(maxsize=8)
def _book(locales: tuple[str, ...]) -> PhraseBook:
    admitted = user_cache.cached("phrase_books", _origin(locales), lambda: PhraseBook(locales).admitted)
    return PhraseBook(locales, admitted)


def _origin(locales: tuple[str, ...]) -> dict[str, Any]:
    """Returns everything that the phrases of these locales depend on."""
    return {"locales": list(locales), "babel": babel.__version__, "python": platform.python_version(), "code": _code()}


@functools.cache
def _code() -> str:
    return user_cache.source_digest(sys.modules[__name__], cldr_phrases, heldout)


def typed(text: str) -> str:
    """Replaces CLDR's thin and non-breaking spaces by the plain space that keyboards have."""
    return re.sub(r"\s", " ", text)


def _corpus(train: Phrases, cfg: DataConfig, labels: tuple[str, ...] | None = None) -> Corpus:
    count = cfg.heldout_examples
    fixed = dataclasses.replace(train, seed=HELD_OUT_SEED)
    splits = user_cache.cached("heldout", {**fixed.origin(), "count": count}, lambda: _held_out(fixed, count))
    return Corpus(train, splits["validation"], splits["test"], labels)


def _held_out(train: Phrases, count: int) -> dict[str, list[Example]]:
    """Returns the first `count` distinct examples of each held-out split."""
    splits: dict[str, dict[str, Example]] = {"validation": {}, "test": {}}
    for index in range(100 * count):
        missing = {split for split, examples in splits.items() if len(examples) < count}
        if not missing:
            break
        for split, example in train.examples(index, missing):
            splits[split].setdefault(example.get("source", example.get("text", "")), example)
    least = min(map(len, splits.values()))
    if least < count:
        raise DataError(f"data.heldout_examples={count}: CLDR has only {least} distinct phrases")
    return {split: list(examples.values()) for split, examples in splits.items()}


def _locales(*names: str) -> tuple[str, ...]:
    locales = tuple(map(_locale, names))
    if len(set(locales)) < len(locales):
        raise DataError(f"the CLDR locales {', '.join(names)} must differ from each other")
    return locales


def _locale(name: str) -> str:
    """Returns the locale that a name such as `de`, `deu` or `zho_Hans` means."""
    language = read_language(name)
    for locale in (name, language.written if language else name):
        try:
            babel.Locale.parse(locale)
        except (babel.UnknownLocaleError, ValueError):
            continue
        return locale
    raise DataError(f"{name!r} is not a CLDR locale; write one such as 'en', 'de' or 'zh'")


class CldrTranslation(Source):
    """Phrases in `data.source_language` with their translations into `data.target_language`."""

    settings = ("heldout_examples",)
    examples = (PAIRS,)

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        """Returns an endless training split and fixed held-out examples."""
        locales = _locales(cfg.data.source_language, cfg.data.target_language)
        return _corpus(Translations(locales, "train", cfg.seed), cfg.data)


class CldrLanguage(Source):
    """Phrases labeled with their language, one of `data.languages`."""

    settings = ("heldout_examples", "languages")
    examples = (LABELED,)

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` without languages."""
        if not data.languages:
            raise data.error("languages", "must name the CLDR locales to tell apart, such as ('en', 'de')")

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        """Returns an endless training split and fixed held-out examples."""
        phrases = Languages(_locales(*cfg.data.languages), "train", cfg.seed)
        return _corpus(phrases, cfg.data, labels=cfg.data.languages)
