"""The base of transforms that change the texts of examples, whatever else is in them."""

import dataclasses
import itertools
import random
import re
from collections.abc import Callable

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
        """Returns the change of examples."""
        return TextChange(self.change_text, self.sides, fixed_pattern(training.tokenizers))


@dataclasses.dataclass(frozen=True)
class TextChange:
    """Changes texts of examples around what matches `fixed`."""

    change: Callable[[str, random.Random], str]
    sides: tuple[str, ...]
    fixed: re.Pattern[str] | None

    def __call__(self, example: Example, rng: random.Random, index: int) -> Example:
        changed = {key: self._text(text, rng) for key, text in example.items() if self._is_changed(key)}
        return {**example, **changed}

    def _is_changed(self, key: str) -> bool:
        return key in self.sides if key in SIDES else key not in NO_TEXT

    def _text(self, text: str, rng: random.Random) -> str:
        if self.fixed is None:
            return self.change(text, rng)
        originals: dict[int, str] = {}
        numbers = itertools.count(FIRST_MARK)

        def mark(match: re.Match[str]) -> str:
            originals[number := next(numbers)] = match[0]
            return chr(number)

        return self.change(self.fixed.sub(mark, text), rng).translate(originals)


def fixed_pattern(tokenizers: Tokenizers) -> re.Pattern[str] | None:
    """Returns a pattern of what transforms leave as it is: symbols and placeholders; None if there are none."""
    placeholders = tokenizers.placeholders
    symbols = map(re.escape, sorted(placeholders.symbols, key=len, reverse=True))
    patterns = [*symbols, *(pattern for name, pattern in PATTERNS.items() if name in placeholders.names)]
    return re.compile("|".join(patterns)) if patterns else None
