"""Language tags: special tokens that tell a model which language a text is in, or is to be in."""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.config.directions import Direction
from tformer_jax.data.columns import Block, Column
from tformer_jax.data.languages import english_name, read_language
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.base import TAG
from tformer_jax.special_tokens import IGNORED

NAME = re.compile(re.escape(TAG).replace(r"\{\}", "(.+)"))


def languages_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of the language tags of a vocabulary by language, in order."""
    matches = ((i, NAME.fullmatch(name)) for i, name in tokenizer.special.names)
    return {match[1]: i for i, match in matches if match}


def find_language(tokenizer: Tokenizer, name: str) -> str:
    """Returns the language of a vocabulary that a code or an English name means.

    Raises:
        UserError: the vocabulary has no tag of it; the message names the nearest.
    """
    languages = list(languages_of(tokenizer))
    if name in languages:
        return name
    meant = read_language(name)
    same = [other for other in languages if meant and read_language(other) == meant]
    if len(same) == 1:
        return same[0]
    codes = {other: read_language(other) for other in languages}
    near = [other for other, language in codes.items() if meant and language and language[:2] == meant[:2]]
    if meant and meant.region is None and len(near) == 1:
        return near[0]
    names = {english_name(other).partition(" (")[0].lower(): other for other in languages}
    near = near or [names[alike] for alike in difflib.get_close_matches(name.lower(), names, 3, 0.7)]
    near = near or difflib.get_close_matches(name, languages, 3, 0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise UserError(f"the model has no language {name!r}{hint}; it has {', '.join(languages) or 'no language tags'}")


def tag_ids(data: DataConfig, tokenizers: Tokenizers, direction: Direction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tags with which a source starts, and a target."""
    sides = ((data.source_tags, tokenizers.source), (data.target_tags, tokenizers.target))
    source, target = (
        tuple(languages_of(tokenizer)[getattr(direction, name)] for name in names) for names, tokenizer in sides
    )
    return source, target


def direction_column(tokenizers: Tokenizers, directions: Sequence[str]) -> Column:
    """Returns the numbers of the source's and the target's language of each example, in the order of the tags.

    Raises:
        UserError: the vocabulary has no tag of a language.
    """
    numbers = {language: number for number, language in enumerate(languages_of(tokenizers.target))}
    pairs = {name: Direction.parse(name) for name in dict.fromkeys(directions)}
    for language in {language for pair in pairs.values() for language in pair} - numbers.keys():
        find_language(tokenizers.target, language)  # says what is wrong
        raise UserError(f"the data has the language {language!r}, but the vocabulary writes it otherwise")
    ids = {name: [numbers[language] for language in pair] for name, pair in pairs.items()}
    return Column.of([ids[name] for name in directions])


class Tags(NamedTuple):
    """The tags of sides, which start with those of the languages that `source` and `target` name."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    source_ids: np.ndarray
    """int32 [languages]: tags in the vocabulary of sources."""
    target_ids: np.ndarray
    """int32 [languages]: tags in the vocabulary of targets."""

    @classmethod
    def from_config(cls, data: DataConfig, tokenizers: Tokenizers) -> "Tags":
        """Returns the tags of a config."""
        ids = (np.array([*languages_of(side).values()], np.int32) for side in (tokenizers.source, tokenizers.target))
        return cls(data.source_tags, data.target_tags, *ids)

    def prepend_to_sources(self, ids: Block) -> Column:
        """Returns sources with their tags, of examples with directions."""
        return self._prepend(ids, "source", self.source, self.source_ids)

    def prepend_to_targets(self, ids: Block, *, labels: bool = False) -> Column:
        """Returns targets with their tags, which are no `labels` to predict."""
        return self._prepend(
            ids, "target", self.target, np.full_like(self.target_ids, IGNORED) if labels else self.target_ids
        )

    def _prepend(self, ids: Block, side: str, names: tuple[str, ...], tags: np.ndarray) -> Column:
        column, directions = ids[side], ids["direction"].ids.reshape(-1, 2)
        for name in reversed(names):
            column = column.prepend(tags[directions[:, Direction._fields.index(name)]])
        return column
