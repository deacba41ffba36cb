"""Noise of white space, punctuation, typing and words, as users' texts have it."""

import dataclasses
import itertools
import random
import re
import unicodedata

from tformer_jax.config.fields import setting
from tformer_jax.data.transforms.texts import TextTransform, is_fixed

WORD = re.compile(r"[^\W\d_]{2,}")
"""A word in which a typo can be made."""
MARK = re.compile(r"(?<!\d)[^\w\s](?!\d)")
"""A character that may be punctuation, beside no digit: without it, or twice, a number would be another one."""
SPACES = re.compile(r"(\s+)")
KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
"""Rows of a keyboard."""
NEIGHBORS = {
    row[place]: row[max(place - 1, 0) : place] + row[place + 1 : place + 2] for row in KEYS for place in range(len(row))
}


class DrawnChange(TextTransform):
    """Draws one of the `changes` of its settings for each word or mark."""

    changes: tuple[str, ...]

    def check(self) -> None:
        if not self.changes:
            raise self.error("changes", "must have a value to draw; leave the transform out instead")


@dataclasses.dataclass(frozen=True)
class Spacing(DrawnChange):
    """Joins words, splits them, or doubles the space after them; the numbers of a text stay the same."""

    rate: float = setting(0.1, "probability with which a word is changed", low=0, high=1)
    changes: tuple[str, ...] = setting(
        ("join", "split"),
        "drawn for a word: join it with the next, split it, or double the space after it, which data.clean_whitespace "
        "removes again",
        choices=("join", "split", "double"),
    )

    def change_text(self, text: str, rng: random.Random) -> str:
        words = text.split(" ")
        for place, word in enumerate(words):
            change = rng.choice(self.changes) if rng.random() < self.rate else None
            cuts = [cut for cut in range(1, len(word)) if not _has_digit(word[cut - 1 : cut + 1])]
            if change == "split" and cuts:
                cut = rng.choice(cuts)
                words[place] = f"{word[:cut]} {word[cut:]}"
            if place < len(words) - 1:
                if _has_digit(word[-1:]) and _has_digit(words[place + 1][:1]):
                    change = None
                words[place] += {"join": "", "double": "  "}.get(change or "", " ")
        return "".join(words)


@dataclasses.dataclass(frozen=True)
class Punctuation(DrawnChange):
    """Removes or repeats punctuation marks, but none beside a digit."""

    rate: float = setting(0.2, "probability with which a mark is changed", low=0, high=1)
    changes: tuple[str, ...] = setting(
        ("remove", "repeat"), "drawn for a mark: remove it, or write it twice", choices=("remove", "repeat")
    )

    def change_text(self, text: str, rng: random.Random) -> str:
        def change(match: re.Match[str]) -> str:
            if not unicodedata.category(match[0]).startswith("P") or rng.random() >= self.rate:
                return match[0]
            return "" if rng.choice(self.changes) == "remove" else 2 * match[0]

        return MARK.sub(change, text)


@dataclasses.dataclass(frozen=True)
class Typos(DrawnChange):
    """Makes typing errors in words of at least two letters, one a word."""

    rate: float = setting(0.1, "probability with which a word is changed", low=0, high=1)
    changes: tuple[str, ...] = setting(
        ("swap", "remove", "repeat", "key"),
        "drawn for a word: swap two neighboring letters, remove or repeat a letter, or press the key beside a letter's "
        "key (letters other than a to z: write another letter of the word)",
        choices=("swap", "remove", "repeat", "key"),
    )

    def change_text(self, text: str, rng: random.Random) -> str:
        def change(match: re.Match[str]) -> str:
            return self._misspell(match[0], rng) if rng.random() < self.rate else match[0]

        return WORD.sub(change, text)

    def _misspell(self, word: str, rng: random.Random) -> str:
        change = rng.choice(self.changes)
        place = rng.randrange(len(word) - (change == "swap"))
        before, letter, after = word[:place], word[place], word[place + 1 :]
        if change == "swap":
            return before + after[0] + letter + after[1:]
        if change == "remove":
            return before + after
        if change == "repeat":
            return before + 2 * letter + after
        key = rng.choice(NEIGHBORS.get(letter.lower(), word))
        return before + (key.upper() if letter.isupper() else key) + after


@dataclasses.dataclass(frozen=True)
class WordDropout(TextTransform):
    """Removes words, which white space separates ("Unsupervised Machine Translation ...", 2018).

    At least one stays, and so do all words with a symbol or placeholder.
    """

    rate: float = setting(0.1, "probability with which a word is removed", low=0, high=1)

    def change_text(self, text: str, rng: random.Random) -> str:
        """Returns the text without some words, and without the spaces before them."""
        start, body, end = _without_margins(text)
        first, *others = SPACES.split(body)
        words = [("", first), *zip(others[::2], others[1::2], strict=True)]
        remaining = [pair for pair in words if rng.random() >= self.rate or is_fixed(pair[1])] or [rng.choice(words)]
        return start + remaining[0][1] + "".join(space + word for space, word in remaining[1:]) + end


@dataclasses.dataclass(frozen=True)
class WordSwap(TextTransform):
    """Permutes words, each by a few places at most ("Unsupervised Machine Translation ...", 2018, section 2.3).

    Words with a symbol or placeholder stay where they are, and no word moves past them.
    """

    distance: int = setting(3, "maximum number of places by which a word moves", low=1)

    def change_text(self, text: str, rng: random.Random) -> str:
        """Returns the text with its words in another order, between the same spaces."""
        start, body, end = _without_margins(text)
        parts = SPACES.split(body)
        words = parts[::2]
        fixed = list(map(is_fixed, words))
        keys = [place + (0 if fixed[place] else rng.random() * (self.distance + 1)) for place in range(len(words))]
        runs = itertools.groupby(range(len(words)), fixed.__getitem__)
        parts[::2] = [words[place] for _, run in runs for place in sorted(run, key=keys.__getitem__)]
        return "".join((start, *parts, end))


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


def _without_margins(text: str) -> tuple[str, str, str]:
    """Returns the white space before a text, the text, and the white space after it."""
    rest = text.lstrip()
    body = rest.rstrip()
    return text[: len(text) - len(rest)], body, rest[len(body) :]
