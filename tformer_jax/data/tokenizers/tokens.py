"""What tokens stand for in texts."""

import re
from collections.abc import Callable, Iterable, Sequence

from tformer_jax.data.characters import SIGNS
from tformer_jax.data.tokenizers.base import Decoder, Tokenizer

WORD = re.compile(rf"[\w{SIGNS}]+(?:['’\-][\w{SIGNS}]+)*")
UNKNOWN_WORD = "\ue000\ue001"
"""A word of private-use characters, which no vocabulary has."""


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


def token_ranges(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], read: Callable[[str], str] = str
) -> list[range]:
    """Returns the places of the tokens of each span of characters of a text, which may be empty.

    Spans that a token joins share their tokens.

    Args:
        read: returns a text, or the beginning of one, with symbols for its placeholders.
    """
    texts = [text, *(text[:stop] for _, stop in spans)]
    ids, *beginnings = tokenizer.encode_batch(list(map(read, texts)))
    ends = [len(some) if some == ids[: len(some)] else None for some in beginnings]
    starts = [max((end for end in ends[:n] if end is not None), default=0) for n in range(len(ends))]
    stops = [min((end for end in ends[n:] if end is not None), default=len(ids)) for n in range(len(ends))]
    return [*map(range, starts, stops)]


def unknown_per_word(tokenizer: Tokenizer) -> int:
    """Returns the number of unknown tokens of an unknown word of two letters: 0 if texts never have unknown tokens."""
    return tokenizer.special.count_unknown(tokenizer.encode(UNKNOWN_WORD))
