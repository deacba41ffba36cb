"""Directions of translation, from a source to a target language; checks of these and of mixtures of data."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from tformer_jax.config import kinds

MULTILINGUAL = (
    *("both_directions", "zero_shot", "source_tags", "target_tags", "temperature", "upsampling"),
    "tokenizer_temperature",
)
"""Settings of data of many languages."""


LANGUAGE = re.compile(r"[^\W_][\w@.]*")
"""A code of a language, such as `pt_BR` or `ca@valencia`."""


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
        if len(targets) != 1 or source == targets[0] or not all(map(LANGUAGE.fullmatch, (source, *targets))):
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


def check_directions(data: Any) -> None:
    """Raises `ConfigError` for directions that are invalid or named twice, and for what does not fit them."""
    for name in ("directions", "zero_shot"):
        for text in getattr(data, name):
            try:
                Direction.parse(text)
            except ValueError as error:
                raise data.error(name, str(error)) from error
    listed = [Direction.parse(text) for text in data.directions]
    read = [*listed, *(direction.reverse for direction in listed if data.both_directions)]
    for text in dict.fromkeys(map(str, (*read, *map(Direction.parse, data.zero_shot)))):
        if (*map(str, read), *data.zero_shot).count(text) > 1:
            raise data.error("directions", f"has {text!r} twice, with both_directions and zero_shot; write it once")
    if not data.multilingual:
        for name in MULTILINGUAL:
            if name in data.changed_settings():
                default = type(data).__dataclass_fields__[name].default
                raise data.error(name, f"is used only with data.directions or language_fields; write {default!r}")
        return
    for name in ("source_language", "target_language"):
        if name in data.changed_settings():
            raise data.error(name, "is not used with several directions; leave it out")
    if {"moses", "punctuation"} & {*data.normalize}:
        raise data.error("normalize", "cannot have moses or punctuation with several languages, whose rules differ")


def check_mixture(data: Any) -> None:
    """Raises `ConfigError` for weights and stages that make no sense, or do not fit other settings."""
    parts, what = len(data.train), "entries of data.train"
    if data.multilingual:
        parts, what = len(data.wanted_directions), "directions of data.directions"
    if data.weights and data.multilingual and not data.directions:
        raise data.error("weights", "needs data.directions, whose order the weights have")
    if data.weights and len(data.weights) != parts:
        raise data.error("weights", f"must have one number for each of the {parts} {what}")
    splits_files = data.source != "prepared" and data.source in kinds.Users(kinds.CORPORA, "validation")
    if data.multilingual and not data.validation and splits_files:
        raise data.error("validation", "must name data, because many languages have no common last part to hold out")
    if data.mixed and not data.validation and splits_files:
        raise data.error(data.mixed, "requires data.validation, because a mixture has no last part to hold out")
    if data.weight_by != "examples" and not data.mixed:
        raise data.error("weight_by", "is used only with data.weights; set them, or write 'examples'")
    if data.weights and (data.temperature != 1 or data.upsampling is not None):
        raise data.error("temperature", "and data.upsampling must be left out with data.weights")
    if data.stages:
        from tformer_jax.config.stages import check_stages

        check_stages(data)
