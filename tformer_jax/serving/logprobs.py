"""Log-probabilities of tokens in the format of OpenAI's completions."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tformer_jax.data.tokenizers import Decoder
from tformer_jax.inference.detokenization import TextStream
from tformer_jax.inference.scores import Scored

LOWEST = -9999.0
"""Smallest log-probability in a response, as in OpenAI's API: JSON has no infinity."""
Part = tuple[Decoder, Sequence[int]]
"""A part of a choice that is decoded separately: its decoder and its token ids."""


def logprobs(parts: Sequence[Part], scored: Scored) -> dict[str, Any]:
    """Returns the log-probabilities of the tokens of a choice.

    Args:
        parts: prompt and output, or the output.
        scored: scores of the last tokens; earlier tokens, such as the first token of a prompt, have no score.
    """
    places = [(decoder, part, n) for decoder, part in parts for n in range(len(part))]
    tokens = [piece for part in parts for piece in added_texts(*part)]
    named = (decoder.special.name(part[n]) is not None for decoder, part, n in places)
    lengths = (0 if special else len(piece) for special, piece in zip(named, tokens, strict=True))
    missing = len(tokens) - len(scored.tokens)
    rows = zip(
        places[missing:], tokens[missing:], scored.log_probabilities, scored.top or itertools.repeat({}), strict=False
    )
    top = [
        {name: clip_log_probability(value), **other_logprobs(*place, name, best)} for place, name, value, best in rows
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [None] * missing + [clip_log_probability(value) for value in scored.log_probabilities],
        "top_logprobs": [None] * missing + top,
        "text_offset": list(itertools.accumulate(lengths, initial=0))[:-1],
    }


def added_texts(tokenizer: Decoder, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to the decoded text; for a special token, which adds none, its name.

    A token that ends within a character adds no text, and the token that completes it adds the character.
    """
    stream = TextStream(tokenizer)
    names = [tokenizer.special.name(i) for i in ids]
    texts = [stream.feed(i) if name is None else name for i, name in zip(ids, names, strict=True)]
    last = max((n for n, name in enumerate(names) if name is None), default=None)
    if last is not None:
        texts[last] += stream.close()
    return texts


def other_logprobs(
    tokenizer: Decoder, ids: Sequence[int], place: int, name: str, best: Mapping[int, float]
) -> dict[str, float]:
    """Returns the log-probabilities of the most probable tokens at a place, without the token there.

    Tokens with the same text as an earlier one are named by their ids.
    """
    before = ids[place - 1] if place and tokenizer.special.name(ids[place - 1]) is None else None
    named: dict[str, float] = {}
    for i, value in best.items():
        if i != ids[place]:
            text = text_after(tokenizer, before, i)
            named[f"token_id:{i}" if text in (name, *named) else text] = clip_log_probability(value)
    return named


def text_after(tokenizer: Decoder, before: int | None, token: int) -> str:
    """Returns the text that a token adds after another one, or alone."""
    if (name := tokenizer.special.name(token)) is not None:
        return name
    if before is not None:
        first, both = tokenizer.decode([before]), tokenizer.decode([before, token])
        if both.startswith(first):
            return both[len(first) :]
    return tokenizer.decode([token])


def clip_log_probability(value: float) -> float:
    """Returns a log-probability that JSON can represent."""
    return value if value > LOWEST else LOWEST
