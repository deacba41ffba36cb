"""Texts in another case."""

import dataclasses
import random
import re

from tformer_jax.config.fields import setting
from tformer_jax.data.transforms.texts import SIDES, TextTransform

FIRST = re.compile(r"(?<![^\s(\[{\"“‘„«-])'?[^\W\d_]")
"""The first letter of a word: after white space, a bracket, a quotation mark or a hyphen."""


def capitalize_words(text: str) -> str:
    """Returns the text with the first letter of each word in title case; other letters stay as they are."""
    return FIRST.sub(lambda match: match[0].title(), text)


FORMS = {"upper": str.upper, "lower": str.lower, "title": capitalize_words}


@dataclasses.dataclass(frozen=True)
class Case(TextTransform):
    """Writes texts in capital letters, small letters or with capitalized words."""

    sides: tuple[str, ...] = setting(SIDES, "sides of pairs that are changed", choices=SIDES)
    form: str = setting("upper", "upper, lower, or title: capitalized words", choices=tuple(FORMS))

    def change_text(self, text: str, rng: random.Random) -> str:
        return FORMS[self.form](text)
