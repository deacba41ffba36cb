"""The base of transforms that change the texts of examples, whatever else is in them."""

import dataclasses
import functools
import itertools
import random
import re

from tformer_jax.base.errors import UserError
from tformer_jax.config.fields import setting
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import Example
from tformer_jax.data.corpora.example import NO_TEXT
from tformer_jax.data.placeholders import PATTERNS
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.transforms.base import Change, Training

SIDES = ("source", "target")
FIRST_MARK = 0x100000
"""First of the private-use characters that stand for symbols and placeholders while a text is changed."""


def is_fixed(word: str) -> bool:
    """Returns whether a word has a symbol or placeholder, given as the character that stands for it."""
    return any(ord(character) >= FIRST_MARK for character in word)


@dataclasses.dataclass(frozen=True)
class TextTransform(Transform):
    """Changes the texts of an example, without their symbols and placeholders; a kind implements `change_text`."""

    sides: tuple[str, ...] = setting(
        ("source",), "sides of pairs that are changed; other texts are changed whatever it is", choices=SIDES
    )

    def change_text(self, text: str, rng: random.Random) -> str:
        """Returns a changed text, in which a private-use character stands for each symbol and placeholder."""
        raise NotImplementedError

    def prepare(self, training: Training) -> Change:
        return functools.partial(self._change_example, fixed_pattern(training.tokenizers))

    def _change_example(
        self, fixed: re.Pattern[str] | None, example: Example, rng: random.Random, index: int
    ) -> Example:
        keys = [key for key in example if (key in self.sides if key in SIDES else key not in NO_TEXT)]
        return {**example, **{key: self._change_around(fixed, example[key], rng) for key in keys}}

    def _change_around(self, fixed: re.Pattern[str] | None, text: str, rng: random.Random) -> str:
        """Returns a changed text in which what matches `fixed` is as before."""
        if fixed is None:
            return self._changed(text, rng)
        originals: dict[int, str] = {}
        numbers = (number for number in itertools.count(FIRST_MARK) if chr(number) not in text)

        def mark(match: re.Match[str]) -> str:
            originals[number := next(numbers)] = match[0]
            return chr(number)

        return self._changed(fixed.sub(mark, text), rng).translate(originals)

    def _changed(self, text: str, rng: random.Random) -> str:
        changed: object = self.change_text(text, rng)
        if not isinstance(changed, str):
            raise UserError(f"transform {self.kind!r}: change_text returned {changed!r}: return a text")
        return changed


def fixed_pattern(tokenizers: Tokenizers) -> re.Pattern[str] | None:
    """Returns a pattern of what transforms leave as it is: symbols and placeholders; None if there are none."""
    placeholders = tokenizers.placeholders
    symbols = map(re.escape, sorted(placeholders.symbols, key=len, reverse=True))
    patterns = [*symbols, *(pattern for name, pattern in PATTERNS.items() if name in placeholders.names)]
    return re.compile("|".join(patterns)) if patterns else None
