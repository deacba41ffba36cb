"""The languages of a vocabulary: special tokens whose names are codes of languages, as published models write them."""

import difflib
import re

from tformer_jax.base.errors import UserError
from tformer_jax.data.languages import english_name, read_language
from tformer_jax.data.tokenizers.base import TAG, Tokenizer

NAMES = (
    re.escape(TAG).replace(r"\{\}", "(.+)"),  # MADLAD-400 writes them as this package does
    r"__([a-z]{2,3})__",  # M2M-100
    r">>([a-z]{2,3}(?:_[A-Za-z]{2,4})?)<<",  # Marian
    r"([a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3})",  # mBART, NLLB
)
NAME = re.compile("|".join(NAMES))
"""Names of language tags; the language is the only group that matches."""


def tagged_language(name: str) -> str | None:
    """Returns the language that the name of a token is the tag of; None: it is no tag."""
    match = NAME.fullmatch(name)
    return match and next(filter(None, match.groups()))


def languages_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of the language tags of a vocabulary by language, in order."""
    languages = ((tagged_language(name), i) for i, name in tokenizer.special.names)
    return {language: i for language, i in languages if language}


def tag_names(tokenizer: Tokenizer) -> list[str]:
    """Returns the names of the language tags of a vocabulary, in order."""
    return [name for _, name in tokenizer.special.names if tagged_language(name)]


def matching_languages(tokenizer: Tokenizer, name: str) -> list[str]:
    """Returns the languages of a vocabulary that a code or an English name may mean.

    A name without a script or a region means a language in any script or region, unless the vocabulary has its tag.
    """
    languages = list(languages_of(tokenizer))
    if name in languages:
        return [name]
    meant = read_language(name)
    if meant is None:
        return []
    codes = {other: language for other in languages if (language := read_language(other)) and language[0] == meant.code}
    if same := [other for other, language in codes.items() if language == meant]:
        return same
    scripts = {meant.script} if meant.script in meant.written.split("_") else {code.script for code in codes.values()}
    return [other for other, code in codes.items() if code.script in scripts and meant.region is None]


def find_language(tokenizer: Tokenizer, name: str) -> str:
    """Returns the language of a vocabulary that a code or an English name means.

    Raises:
        UserError: the vocabulary has no tag of it, or several; the message names them, or the nearest.
    """
    name = name.strip()
    matches = matching_languages(tokenizer, name)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"the model has the language {name!r} as {' and '.join(map(repr, matches))}: name one of them")
    languages, meant = list(languages_of(tokenizer)), read_language(name)
    near = [other for other in languages if meant and (read_language(other) or ("",))[0] == meant.code]
    names = {english_name(other).partition(" (")[0].lower(): other for other in languages}
    near = near or [names[alike] for alike in difflib.get_close_matches(name.lower(), names, 3, 0.7)]
    near = near or difflib.get_close_matches(name, languages, 3, 0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise UserError(f"the model has no language {name!r}{hint}; it has {', '.join(languages) or 'no language tags'}")
