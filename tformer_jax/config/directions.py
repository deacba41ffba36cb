"""Directions of translation: the language of the source and the language of the target."""

from collections.abc import Iterable
from typing import NamedTuple


class Direction(NamedTuple):
    """A source and a target language; as text, `en-pt_BR`."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    @classmethod
    def parse(cls, text: str) -> "Direction":
        """Reads a text such as `en-pt_BR`.

        Raises:
            ValueError: the text is not two different codes, joined by a hyphen.
        """
        source, *targets = text.split("-")
        if len(targets) != 1 or not source or not targets[0] or source == targets[0]:
            raise ValueError(f"{text!r} must be two different codes, joined by a hyphen: 'en-de' or 'en-pt_BR'")
        return cls(source, targets[0])

    @classmethod
    def of_codes(cls, source: str, target: str) -> "Direction":
        """Returns the direction between two codes of data, whose hyphens (`pt-BR`) become underscores."""
        return cls(source.replace("-", "_"), target.replace("-", "_"))

    @property
    def reverse(self) -> "Direction":
        """The opposite direction."""
        return Direction(self.target, self.source)


def with_reverses(directions: Iterable[Direction]) -> list[Direction]:
    """Returns each direction, followed by its reverse; none twice."""
    return list(dict.fromkeys(each for direction in directions for each in (direction, direction.reverse)))
