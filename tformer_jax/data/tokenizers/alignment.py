"""The parts of a text that its tokens stand for."""

import re

from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.extended import unextended
from tformer_jax.data.tokenizers.normalization import NormalizedTokenizer

WORD = re.compile(r"\w+(?:['’\-]\w+)*")
UNKNOWN_WORD = "\ue000\ue001"
"""A word of private-use characters, which no vocabulary has."""


def copied_words(tokenizer: Tokenizer, text: str, *, whole_words: bool) -> list[str]:
    """Returns for each token of a text what stands in the text for it: its characters, or the word that it is part of.

    Args:
        tokenizer: one whose ids of the first words of a text are, mostly, the first ids of the text.
        text: is normalized first if the tokenizer normalizes.
        whole_words: return the word of a token that is not unknown, instead of its characters.
    """
    inner = unextended(tokenizer)
    if isinstance(inner, NormalizedTokenizer):
        text, inner = inner.normalize(text), inner.tokenizer
    ids, ends = inner.encode(text), _ends(inner, text)
    words = [match.span() for match in WORD.finditer(text)] if whole_words else []
    parts = []
    for number, token in enumerate(ids):
        start = max(end for count, end in ends.items() if count <= number)
        stop = min((end for count, end in ends.items() if count > number), default=len(text))
        if token != inner.special.unknown:
            start, stop = next(((a, b) for a, b in words if a < stop and start < b), (start, stop))
        parts.append(text[start:stop].strip())
    return parts


def unknown_per_word(tokenizer: Tokenizer) -> int:
    """Returns the number of unknown tokens of an unknown word of two letters: 0 if texts never have unknown tokens."""
    return tokenizer.special.count_unknown(tokenizer.encode(UNKNOWN_WORD))


def _ends(tokenizer: Tokenizer, text: str) -> dict[int, int]:
    """Returns the length of the longest beginning of a text that its first n tokens encode, by n, if there is one."""
    ids = tokenizer.encode(text)
    beginnings = tokenizer.encode_batch([text[:length] for length in range(len(text) + 1)])
    return {0: 0} | {len(some): length for length, some in enumerate(beginnings) if some == ids[: len(some)]}
