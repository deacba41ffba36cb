"""Corpora made from CLDR's locale data with Babel: seeded, endless, and needing neither file nor network."""

import dataclasses
import functools
import random
import re
from collections.abc import Sequence

import babel

from tformer_jax.config import DataConfig
from tformer_jax.data.corpora.cldr_phrases import PhraseBook
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example
from tformer_jax.data.corpora.heldout import split_of

ENDLESS = 2**31
"""Length of an endless split; grain shuffles no longer ones."""

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
        return PhraseBook(self.locales)

    def __getstate__(self) -> dict[str, object]:
        return {"locales": self.locales, "split": self.split, "seed": self.seed}

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index):
        if not 0 <= index < ENDLESS:
            raise IndexError(index)
        draw = random.Random(f"{self.seed} {index}")
        while True:
            candidate = self.candidate(draw)
            if candidate is not None and split_of(candidate[0]) == self.split:
                return candidate[1]

    def candidate(self, draw: random.Random) -> tuple[str, Example] | None:
        """The text that decides the split, and the example; None where the phrase does not serve."""
        raise NotImplementedError


class Translations(Phrases):
    """The same phrase in two locales."""

    def candidate(self, draw: random.Random) -> tuple[str, Example]:
        """A phrase that means one thing only: the source as it is typed, the target as CLDR sets it."""
        source, target = self.book.phrase(draw)
        source = typed(source)
        return source, {"source": source, "target": target}


class Languages(Phrases):
    """A phrase in one of several locales."""

    def candidate(self, draw: random.Random) -> tuple[str, Example] | None:
        """A phrase with letters that no other of the locales writes in the same way."""
        texts = [typed(text) for text in self.book.phrase(draw)]
        chosen = draw.randrange(len(texts))
        text = texts[chosen]
        recognisable = sum(map(str.isalpha, text)) >= LETTERS_TO_RECOGNISE or not text.isascii()
        if texts.count(text) > 1 or not recognisable:
            return None
        return text, {"text": text, "label": self.locales[chosen]}


def typed(text: str) -> str:
    """The text with the one space that keyboards have, for CLDR's thin and unbreakable ones."""
    return re.sub(r"\s", " ", text)


def _corpus(train: Phrases, cfg: DataConfig, labels: tuple[str, ...] | None = None) -> Corpus:
    validation, test = (_distinct(dataclasses.replace(train, split=split), cfg) for split in ("validation", "test"))
    return Corpus(train, validation, test, labels)


def _distinct(phrases: Phrases, cfg: DataConfig) -> list[Example]:
    """The first `cfg.heldout_examples` distinct examples of a split."""
    found: dict[str, Example] = {}
    for index in range(100 * cfg.heldout_examples):
        example = phrases[index]
        found.setdefault(example.get("source", example.get("text", "")), example)
        if len(found) == cfg.heldout_examples:
            return list(found.values())
    raise DataError(f"data.heldout_examples={cfg.heldout_examples}: CLDR gives only {len(found)} distinct phrases")


def _locales(*names: str) -> tuple[str, ...]:
    for name in names:
        try:
            babel.Locale.parse(name)
        except (babel.UnknownLocaleError, ValueError):
            raise DataError(f"{name!r} is not a CLDR locale; write one such as 'en', 'de' or 'zh'") from None
    if len(set(names)) < len(names):
        raise DataError(f"the CLDR locales {', '.join(names)} must differ from each other")
    return names
