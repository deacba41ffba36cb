"""Random Unicode texts, and changes of their white space and invisible characters that must not matter."""

import dataclasses
import functools
import random
import sys
import unicodedata
from collections.abc import Callable

from tformer_jax.data.characters import clean_whitespace

SPACES = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
LINE_ENDS = ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
INVISIBLE = [*map(chr, (0x00, 0x07, 0x1B, 0x7F, 0x80, 0xAD, 0x61C, 0x200B, 0x2060, 0x2063, 0xFEFF, 0xFFFA, 0x1D173))]
BIDIRECTIONAL = [*map(chr, (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))]
JOINERS = ["\u200c", "\u200d", "\u180e"]
MARKS = ["\u0301", "\u0308", "\u064b", "\u094d", "\u0e31", "\u20dd", "\ufe0f", "\ufe0e", "\U000e0101"]
SEQUENCES = [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f3f4\U000e0067\U000e0062\U000e007f",
    *("1\ufe0f\u20e3", "\U0001f1e9\U0001f1ea", "\U000e0041", "e\u0301"),
    *(
        "\u0915\u094d\u200d",
        "\u0645\u06cc\u200c\u062e",
        "\u0d9a\u0dca\u200d\u0dc2",
        "\u05e9\u05c1\u05b8",
        "ไทย",
        "東京",
    ),
]
"""Emoji, letters with marks, and words whose joiners or order of marks matter."""
WORDS = [
    "in",
    "2",
    "weeks",
    "3:33",
    "PM",
    "Haus",
    "the",
    "810.024",
    "</s>",
    "<pad>",
    "<unk>",
    "▁",
    "##a",
    "Ġ",
    "İ",
    "ſ",
]
SURROGATES = [*map(chr, (0xD800, 0xDBFF, 0xDC00, 0xDC80, 0xDFFF))]
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12)
"""Numbers of pieces in a text."""


@functools.cache
def code_points() -> dict[str, list[str]]:
    """Returns all characters but surrogates by general category, unassigned and private ones included."""
    actual: dict[str, list[str]] = {}
    for character in map(chr, range(sys.maxunicode + 1)):
        actual.setdefault(unicodedata.category(character), []).append(character)
    del actual["Cs"]
    return actual


def _piece(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(WORDS)
    if kind < 0.5:
        return draw.choice(code_points()[draw.choice(sorted(code_points()))])
    if kind < 0.6:
        character = chr(0x10000 * draw.randrange(17) + draw.randrange(0x10000))
        return "\ufffd" if unicodedata.category(character) == "Cs" else character
    choices = (SPACES, LINE_ENDS, INVISIBLE, BIDIRECTIONAL, JOINERS, MARKS, SEQUENCES, [" "], [" "])
    return draw.choice(draw.choice(choices))


def text(draw: random.Random) -> str:
    """Draws a text of any characters of Unicode except surrogates; some have no visible character."""
    if draw.random() < 0.03:
        pieces = [draw.choice(draw.choice((SPACES, INVISIBLE, BIDIRECTIONAL, JOINERS, MARKS))) for _ in range(4)]
        return "".join(pieces[: draw.randrange(5)])
    return "".join(_piece(draw) for _ in range(draw.choice(LENGTHS)))


def with_surrogate(draw: random.Random) -> str:
    """Draws a text with a lone surrogate, which is not a character."""
    return f"{text(draw)}{draw.choice(SURROGATES)} {draw.choice(WORDS)}"


def changed(clean: str, draw: random.Random) -> str:
    """Draws another text for a clean one: longer runs of white space, white space at its ends, invisible characters."""

    def blanks(least: int) -> str:
        return "".join(draw.choice(SPACES) for _ in range(draw.randrange(least, least + 3)))

    pieces = [blanks(1) if character == " " else character for character in clean]
    for _ in range(draw.randrange(3)):
        pieces.insert(draw.randrange(len(pieces) + 1), draw.choice(draw.choice((INVISIBLE, BIDIRECTIONAL))))
    return blanks(0) + "".join(pieces) + blanks(0)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Random texts in three forms, aligned."""

    raw: list[str]
    clean: list[str]
    """The normal form of `raw`."""
    changed: list[str]
    """`changed` of `clean`."""

    @classmethod
    def draw(cls, count: int, seed: int) -> "Texts":
        """Draws `count` texts."""
        draw = random.Random(seed)
        raw = [text(draw) for _ in range(count)]
        clean = list(map(clean_whitespace, raw))
        return cls(raw, clean, [changed(text, draw) for text in clean])

    def map(self, function: Callable[[str], str]) -> "Texts":
        """Returns the texts with a function applied to each form."""
        return Texts(*([function(text) for text in form] for form in self.forms.values()))

    def every(self, step: int) -> "Texts":
        """Returns every `step`-th text."""
        return Texts(*(form[::step] for form in self.forms.values()))

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def forms(self) -> dict[str, list[str]]:
        """The three forms by name."""
        return {"raw": self.raw, "clean": self.clean, "changed": self.changed}


def one_line(text: str) -> str:
    """Returns a text that is one line of a file and one cell of a table."""
    return text.replace("\n", "\x0b").replace("\t", "\x0c")
