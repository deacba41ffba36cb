"""Encodes texts as token ids that fit the model's maximum length."""

from collections.abc import Callable, Iterator, Sequence

from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.special_tokens import EOS

WRITE = "write at least one character"


def encode(tokenizer: Tokenizer, texts: Sequence[str], limit: int, what: str, *, cut: bool = False) -> list[list[int]]:
    """Returns the token ids of each text, at most `limit`; `cut` truncates longer texts.

    Raises:
        ConfigError: a text has more tokens, and `cut` is False.
    """
    rest = iter(texts)
    return list(map(reader(tokenizer, rest, limit, what, cut=cut), range(len(texts)), rest))


def reader(
    tokenizer: Tokenizer, texts: Iterator[str], limit: int, what: str, *, cut: bool = False
) -> Callable[[int, str], list[int]]:
    """Returns a function that maps the index of a text, from 0, and the text to token ids; errors name the index."""

    def read(place: int, text: str) -> list[int]:
        ids = tokenizer.encode(text)
        if len(ids) > limit and not cut:
            alone = place == 0 and next(texts, None) is None
            raise too_long(f"the {what}" if alone else f"{what} {place + 1}", len(ids), limit)
        return ids[:limit]

    return read


def source_reader(
    tokenizer: Tokenizer, sources: Iterator[str], max_length: int, *, cut: bool = False
) -> Callable[[int, str], list[int]]:
    """Returns a `reader` of sources that appends EOS, and maps a blank source to []."""
    encode_source = reader(tokenizer, sources, max_length - 1, "source", cut=cut)

    def read(place: int, source: str) -> list[int]:
        return [*encode_source(place, source), EOS] if source.strip() else []

    return read


def prompt_reader(tokenizer: Tokenizer, prompts: Iterator[str], max_length: int) -> Callable[[int, str], list[int]]:
    """Returns a `reader` of prompts that leaves room for one token, and raises an error for an empty prompt."""
    encode_prompt = reader(tokenizer, prompts, max_length - 1, "prompt")

    def read(place: int, prompt: str) -> list[int]:
        row = encode_prompt(place, prompt)
        if not row:
            alone = place == 0 and next(prompts, None) is None
            raise ConfigError(f"{'the prompt' if alone else f'prompt {place + 1}'} is empty: {WRITE}")
        return row

    return read


def encode_one(tokenizer: Tokenizer, text: str, limit: int, name: str) -> list[int]:
    """Returns the token ids of a text, which errors call `name`.

    Raises:
        ConfigError: the text has more than `limit` tokens.
    """
    ids = tokenizer.encode(text)
    if len(ids) > limit:
        raise too_long(name, len(ids), limit)
    return ids


def too_long(name: str, tokens: int, limit: int) -> ConfigError:
    """Returns the error for a text that is too long for the model."""
    return ConfigError(f"{name} has {tokens} tokens, but the model takes at most {limit}: shorten it")
