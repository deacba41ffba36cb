"""Log-probabilities of tokens in the format of OpenAI's completions."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tformer_jax.data.tokenizers import FIRST, Tokenizer
from tformer_jax.inference.score import Scored
from tformer_jax.inference.stopping import TextStream
from tformer_jax.special_tokens import SPECIAL_TOKENS

LOWEST = -9999.0
"""Smallest log-probability in a response, as in OpenAI's API: JSON has no infinity."""


def logprobs(tokenizer: Tokenizer, parts: Sequence[Sequence[int]], scored: Scored) -> dict[str, Any]:
    """Returns the log-probabilities of the tokens of a choice.

    Args:
        parts: token ids of the parts of the choice that are decoded separately: prompt and output, or the output.
        scored: scores of the last of these tokens; those before them have none, such as the first token of a prompt.
    """
    ids = [i for part in parts for i in part]
    tokens = [piece for part in parts for piece in pieces(tokenizer, part)]
    lengths = (len(piece) if i >= FIRST else 0 for i, piece in zip(ids, tokens, strict=True))
    missing = len(ids) - len(scored.tokens)
    rows = zip(range(missing, len(ids)), scored.log_probabilities, scored.top or itertools.repeat({}), strict=False)
    top = [{tokens[n]: finite(value), **others(tokenizer, ids, n, tokens[n], best)} for n, value, best in rows]
    return {
        "tokens": tokens,
        "token_logprobs": [None] * missing + [finite(value) for value in scored.log_probabilities],
        "top_logprobs": [None] * missing + top,
        "text_offset": list(itertools.accumulate(lengths, initial=0))[:-1],
    }


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to the decoded text; for a special token, which adds none, its name.

    A token that ends within a character adds no text, and the token that completes it adds the character.
    """
    stream = TextStream(tokenizer)
    found = [SPECIAL_TOKENS[i] if i < FIRST else stream.feed(i) for i in ids]
    last = max((n for n, i in enumerate(ids) if i >= FIRST), default=None)
    if last is not None:
        found[last] += stream.close()
    return found


def others(
    tokenizer: Tokenizer, ids: Sequence[int], place: int, name: str, best: Mapping[int, float]
) -> dict[str, float]:
    """Returns the log-probabilities of the most probable tokens at a place, except that of the token there.

    Tokens with the same text as an earlier one are named by their ids.
    """
    before = ids[place - 1] if place and ids[place - 1] >= FIRST else None
    found: dict[str, float] = {}
    for i, value in best.items():
        if i != ids[place]:
            text = text_after(tokenizer, before, i)
            found[f"token_id:{i}" if text in (name, *found) else text] = finite(value)
    return found


def text_after(tokenizer: Tokenizer, before: int | None, token: int) -> str:
    """Returns the text that a token adds after another one, or alone."""
    if token < FIRST:
        return SPECIAL_TOKENS[token]
    if before is not None:
        first, both = tokenizer.decode([before]), tokenizer.decode([before, token])
        if both.startswith(first):
            return both[len(first) :]
    return tokenizer.decode([token])


def finite(value: float) -> float:
    """Returns a log-probability that JSON can represent."""
    return value if value > LOWEST else LOWEST
