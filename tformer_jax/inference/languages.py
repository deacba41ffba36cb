"""Languages of translators: which a model has, and the tags that tell it between which to translate."""

import functools
from collections.abc import Sequence

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.config.directions import Direction
from tformer_jax.config.transforms import format_source
from tformer_jax.data.characters import is_blank
from tformer_jax.data.languages import read_language
from tformer_jax.data.tags import tag_ids
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.language_tags import find_language, languages_of
from tformer_jax.inference.encoding import TextError
from tformer_jax.inference.requests import Request

TagIds = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of tags of a source, and of its target."""


class Languages:
    """The languages of a translator.

    Args:
        data: the data that the model was trained on.
    """

    def __init__(self, data: DataConfig, tokenizers: Tokenizers):
        self._data, self._tokenizers = data, tokenizers
        self._cached_tags = functools.cache(self._find_tags)

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """The languages of sources; () for a model of one direction."""
        return self._of_side("source")

    @functools.cached_property
    def targets(self) -> tuple[str, ...]:
        """The languages of targets; () for a model of one direction."""
        return self._of_side("target")

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """The languages to choose from by field of requests, for sides with several languages and a tag for them."""
        sides = {"target": self.targets, "source": self.sources}
        return {f"{side}_language": names for side, names in sides.items() if len(names) > 1 and self._is_told(side)}

    def tags(self, target: str | None = None, source: str | None = None) -> TagIds:
        """Returns the tags with which a source and its target start.

        Args:
            target, source: codes or English names of languages; None: the model has only one on this side, or is not
                told the language.

        Raises:
            UserError: the model does not know the language, or needs one that is not given.
        """
        return self._cached_tags(target, source)

    def tags_of(self, index: int, request: Request) -> TagIds:
        """Returns the tags of text `index` and its target.

        Raises:
            TextError: as `tags` raises `UserError`.
        """
        try:
            return self.tags(request.target_language, request.source_language)
        except UserError as error:
            raise TextError(index, str(error)) from None

    def language_of_source(self, request: Request) -> str:
        """Returns the code of the language of a text, `en` if it is not known."""
        return self._code("source", request.source_language)

    def of_output(self, ids: Sequence[int], tags: Sequence[int]) -> str:
        """Returns the code of the language of an output, `en` if it is not known.

        Args:
            ids: the source, as the model reads it.
            tags: language tags with which the output starts.
        """
        if not self._data.multilingual:
            return self._code("target", None)
        source, target = self._tokenizers.source, self._tokenizers.target
        read = _named_tags(source, self._data.source_tags, ids) | _named_tags(target, self._data.target_tags, tags)
        return self._code("target", read.get("target"))

    def _code(self, side: str, name: str | None) -> str:
        """Returns the code of the language of a side, `en` if it is not known; `name` is as for `tags`."""
        own, languages = own_direction(self._data), getattr(self, f"{side}s")
        if name is None and len(languages) == 1:
            name = languages[0]
        name = name or (getattr(own, side) if own else getattr(self._tokenizers, side).language)
        language = read_language(name or "en")
        return language.code if language else "en"

    def format_source(self, source: str) -> str:
        """Returns a source in the formats of `data.transforms`; a blank one as it is."""
        return source if is_blank(source) else format_source(self._data.transforms, source)

    def _is_told(self, side: str) -> bool:
        """Returns whether the model reads the tag of this side's language."""
        return side in (*self._data.source_tags, *self._data.target_tags)

    def _of_side(self, side: str) -> tuple[str, ...]:
        if not self._data.multilingual:
            return ()
        tokenizer = getattr(self._tokenizers, side)
        if not self._data.wanted_directions:
            return tuple(languages_of(tokenizer))
        directions = (*self._data.wanted_directions, *map(Direction.parse, self._data.zero_shot))
        return tuple(dict.fromkeys(find_language(tokenizer, getattr(direction, side)) for direction in directions))

    def _find_tags(self, target: str | None, source: str | None) -> TagIds:
        if not self._data.multilingual:
            _check_single(self._data, target, source)
            return (), ()
        into = self._find("target", target)
        return tag_ids(self._data, self._tokenizers, Direction(self._find("source", source), into))

    def _find(self, side: str, name: str | None) -> str:
        """Returns the language of a side; "" if it is not given, and the model has no tags for it."""
        languages = getattr(self, f"{side}s")
        listed = ", ".join(languages)
        if name is None and len(languages) > 1:
            if self._is_told(side):
                raise UserError(f"the {side} language is missing: name one of {listed}")
            return ""
        if name is None:
            return str(languages[0])
        language = find_language(getattr(self._tokenizers, side), name)
        if language not in languages:
            raise UserError(f"the model has no {side} language {name!r}, only {listed}")
        return language


def _named_tags(tokenizer: Tokenizer, sides: Sequence[str], ids: Sequence[int]) -> dict[str, str]:
    """Returns the languages whose tags are among `ids` by side, in the order of the `sides` that have tags."""
    languages = {token: language for language, token in languages_of(tokenizer).items()}
    return dict(zip(sides, (languages[token] for token in ids if token in languages), strict=False))


def own_direction(data: DataConfig) -> Direction | None:
    """Returns the direction of a translator that has only one; None if the settings do not specify it."""
    direction = Direction(data.source_language, data.target_language)
    unset = direction == (DataConfig.source_language, DataConfig.target_language)
    specified = data.source in ("cldr_translation", "parallel_lines") or not unset
    return direction if specified and not data.multilingual else None


def _check_single(data: DataConfig, target: str | None, source: str | None) -> None:
    """Raises `UserError` if a language differs from the model's only direction."""
    own = own_direction(data)
    for side, name in (("target", target), ("source", source)):
        language = own and getattr(own, side)
        same = language is not None and (name == language or read_language(name or "") == read_language(language))
        if name is None or same:
            continue
        known = "" if own is None else f", {own.source} to {own.target}"
        raise UserError(f"the model has one direction{known}: leave out the {side} language {name!r}")
