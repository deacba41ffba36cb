"""Language tags: special tokens that tell a model which language a text is in, or is to be in."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tformer_jax.config import DataConfig
from tformer_jax.config.directions import Direction
from tformer_jax.data.columns import Block, Column
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.language_tags import find_language, languages_of


def tag_ids(data: DataConfig, tokenizers: Tokenizers, direction: Direction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tags of a source, and of its target."""

    def find_ids(tokenizer: Tokenizer, names: tuple[str, ...]) -> tuple[int, ...]:
        ids = languages_of(tokenizer)
        return tuple(ids[find_language(tokenizer, getattr(direction, name))] for name in names)

    return find_ids(tokenizers.source, data.source_tags), find_ids(tokenizers.target, data.target_tags)


def direction_column(tokenizers: Tokenizers, directions: Sequence[str]) -> Column:
    """Returns the numbers of the source's and the target's language of each example, in the order of the tags.

    Raises:
        UserError: the vocabulary has no tag of a language, or several.
    """
    numbers = {language: number for number, language in enumerate(languages_of(tokenizers.target))}
    ids = {
        name: [numbers[find_language(tokenizers.target, language)] for language in Direction.parse(name)]
        for name in dict.fromkeys(directions)
    }
    return Column.from_rows([ids[name] for name in directions])


class Tags(NamedTuple):
    """The language tags of sources and targets; `source` and `target` name their languages, "source" or "target"."""

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

    def of_sides(self, ids: Block) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Returns the source tags and the target tags of examples with directions: int32 [examples] each."""
        languages = Direction(*ids["direction"].ids.reshape(-1, 2).T)
        sources = tuple(self.source_ids[getattr(languages, name)] for name in self.source)
        return sources, tuple(self.target_ids[getattr(languages, name)] for name in self.target)
