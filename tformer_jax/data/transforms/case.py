"""Texts in another case."""

import dataclasses
import random

from tformer_jax.config.fields import setting
from tformer_jax.data.transforms.texts import SIDES, TextTransform

FORMS = {"upper": str.upper, "lower": str.lower, "title": str.title}
"""Functions by the value of `form`."""


@dataclasses.dataclass(frozen=True)
class Case(TextTransform):
    """Writes texts in capital letters, small letters or with capitalized words."""

    sides: tuple[str, ...] = setting(SIDES, "sides of pairs that are changed", choices=SIDES)
    form: str = setting("upper", "upper, lower, or title: capitalized words", choices=tuple(FORMS))

    def change_text(self, text: str, rng: random.Random) -> str:
        """Returns the text in the other case."""
        return FORMS[self.form](text)
