"""Tokens that two vocabularies share."""

from typing import NamedTuple

from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.language_tags import languages_of, matching_languages


class Correspondence(NamedTuple):
    """Ids of the shared tokens in two vocabularies, in the order of the first one."""

    here: tuple[int, ...]
    there: tuple[int, ...]
    tokens_there: int
    """Number of tokens of the second vocabulary, shared or not."""
    tags: int = 0
    """Number of shared tags of languages that the vocabularies write differently, such as `<2de>` and `deu_Latn`."""


def correspondence(here: Tokenizer, there: Tokenizer) -> Correspondence | None:
    """Returns the tokens that two tokenizers share, special ones by their names; None if they are not comparable.

    Tokens are compared as the vocabularies write them: "_the" at the start of a word is not "the" within one.
    Vocabularies with different notations, such as byte-level BPE and WordPiece, are not comparable; vocabularies of
    tiktoken are comparable only if their ranks are equal. Tags of languages are compared by the languages that they
    mean.
    """
    (mine, ids), (theirs, others) = _vocabulary(here), _vocabulary(there)
    if mine != theirs:
        return None
    shared = [(ids[token], others[token]) for token in ids if token in others]
    tags = _shared_tags(here, there)
    pairs = sorted([*shared, *tags])
    return Correspondence(tuple(i for i, _ in pairs), tuple(i for _, i in pairs), len(others), len(tags))


def _shared_tags(here: Tokenizer, there: Tokenizer) -> list[tuple[int, int]]:
    """Returns the ids of tags with different names for one language; each vocabulary must have one tag for it."""
    mine, theirs = languages_of(here), languages_of(there)
    meant = {language: matching_languages(there, language) for language in mine}
    return [
        (mine[language], theirs[other])
        for language, others in meant.items()
        for other in others
        if len(others) == 1 and here.special.name(mine[language]) != there.special.name(theirs[other])
        if matching_languages(here, other) == [language]
    ]


def _vocabulary(tokenizer: Tokenizer) -> tuple[str, dict[tuple[str, str], int]]:
    """Returns the notation of a vocabulary, and its ids by kind (special, ordinary or symbol) and token."""
    notation, pieces = tokenizer.vocabulary()
    names = dict(tokenizer.special.names)
    ordinary = {("ordinary", piece): i for piece, i in pieces.items() if i not in names}
    symbols = {("symbol", text): i for text, i in tokenizer.symbol_ids.items()}
    return notation, {("special", name): i for i, name in names.items()} | ordinary | symbols
