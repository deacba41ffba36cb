"""What tokens stand for: in texts, and in the vocabularies of two tokenizers."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tformer_jax.data.placeholders import mask
from tformer_jax.data.tokenizers.base import Decoder, Tokenizer
from tformer_jax.data.tokenizers.language_tags import languages_of, matching_languages

WORD = re.compile(r"\w+(?:['’\-]\w+)*")
UNKNOWN_WORD = "\ue000\ue001"
"""A word of private-use characters, which no vocabulary has."""


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
    Vocabularies with another notation, such as those of byte-level BPE and WordPiece, are not comparable; those of
    tiktoken only with the same ranks. Tags of languages are compared by the languages that they mean.
    """
    (mine, ids), (theirs, others) = _vocabulary(here), _vocabulary(there)
    if mine != theirs:
        return None
    shared = [(ids[token], others[token]) for token in ids if token in others]
    tags = _shared_tags(here, there)
    pairs = sorted([*shared, *tags])
    return Correspondence(tuple(i for i, _ in pairs), tuple(i for _, i in pairs), len(others), len(tags))


def _shared_tags(here: Tokenizer, there: Tokenizer) -> list[tuple[int, int]]:
    """Returns the ids of tags that have different names and mean one language, of which each vocabulary has one tag."""
    mine, theirs = languages_of(here), languages_of(there)
    meant = {language: matching_languages(there, language) for language in mine}
    return [
        (mine[language], theirs[other])
        for language, others in meant.items()
        for other in others
        if len(others) == 1 and here.special.name(mine[language]) != there.special.name(theirs[other])
        if matching_languages(here, other) == [language]
    ]


def token_texts(tokenizer: Decoder, ids: Iterable[int]) -> list[str]:
    """Returns the text of each id alone; special tokens by their names."""
    return [tokenizer.special.name(i) or tokenizer.decode([i]) for i in ids]


def document_end(tokenizer: Tokenizer) -> int | None:
    """Returns the token that ends documents; None if the vocabulary has none, as nanoGPT's characters have."""
    end = tokenizer.special.eos[0]
    return end if end < tokenizer.vocab_size else None


def same_tokens(here: Tokenizer, there: Tokenizer) -> bool:
    """Returns whether the ids that two tokenizers share have the same texts."""
    ids = range(min(here.vocab_size, there.vocab_size))
    return here is there or here.to_json() == there.to_json() or token_texts(here, ids) == token_texts(there, ids)


def copied_words(tokenizer: Tokenizer, text: str, *, whole_words: bool) -> list[str]:
    """Returns for each token of a text what stands in the text for it: its characters, or the word that it is part of.

    Args:
        tokenizer: one whose ids of the first words of a text are, mostly, the first ids of the text.
        text: is normalized first if the tokenizer normalizes.
        whole_words: return the word of a token that is not unknown, instead of its characters.
    """
    text = tokenizer.normalize(text)
    ids, *beginnings = tokenizer.encode_with_symbols([text, *(text[:length] for length in range(len(text) + 1))])
    ends = {0: 0} | {len(some): length for length, some in enumerate(beginnings) if some == ids[: len(some)]}
    words = [match.span() for match in WORD.finditer(text)] if whole_words else []
    parts = []
    for number, token in enumerate(ids):
        start = max(end for count, end in ends.items() if count <= number)
        stop = min((end for count, end in ends.items() if count > number), default=len(text))
        if token != tokenizer.special.unknown:
            start, stop = next(((a, b) for a, b in words if a < stop and start < b), (start, stop))
        parts.append(text[start:stop].strip())
    return parts


def token_ranges(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> list[range]:
    """Returns the places of the tokens of each span of characters of a text, which may be empty.

    Spans that a token joins share their tokens.
    """
    texts = [text, *(text[:stop] for _, stop in spans)]
    ids, *beginnings = tokenizer.encode_batch([mask(tokenizer.placeholders, part).text for part in texts])
    ends = [len(some) if some == ids[: len(some)] else None for some in beginnings]
    starts = [max((end for end in ends[:n] if end is not None), default=0) for n in range(len(ends))]
    stops = [min((end for end in ends[n:] if end is not None), default=len(ids)) for n in range(len(ends))]
    return [*map(range, starts, stops)]


def unknown_per_word(tokenizer: Tokenizer) -> int:
    """Returns the number of unknown tokens of an unknown word of two letters: 0 if texts never have unknown tokens."""
    return tokenizer.special.count_unknown(tokenizer.encode(UNKNOWN_WORD))


def _vocabulary(tokenizer: Tokenizer) -> tuple[str, dict[tuple[str, str], int]]:
    """Returns the notation of a vocabulary, and its ids by kind (special, ordinary or symbol) and token."""
    notation, pieces = tokenizer.vocabulary()
    names = dict(tokenizer.special.names)
    ordinary = {("ordinary", piece): i for piece, i in pieces.items() if i not in names}
    symbols = {("symbol", text): i for text, i in tokenizer.symbol_ids.items()}
    return notation, {("special", name): i for i, name in names.items()} | ordinary | symbols
