"""From texts to token ids that a model has room for."""

from collections.abc import Callable, Iterator, Sequence

from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.special_tokens import EOS

WRITE = "write at least one character"


def encode(tokenizer: Tokenizer, texts: Sequence[str], limit: int, what: str, *, cut: bool = False) -> list[list[int]]:
    """Token ids of each text, at most `limit`; longer ones are shortened where `cut`.

    Raises:
        ConfigError: a text has more tokens, and `cut` is False.
    """
    rest = iter(texts)
    return list(map(reader(tokenizer, rest, limit, what, cut=cut), range(len(texts)), rest))


def reader(
    tokenizer: Tokenizer, texts: Iterator[str], limit: int, what: str, *, cut: bool = False
) -> Callable[[int, str], list[int]]:
    """What encodes the texts of an iterator, each with its place from 0, and names the one that is too long."""

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
    """What `reader` makes of sources, each ended by EOS; nothing of a blank one."""
    encode_source = reader(tokenizer, sources, max_length - 1, "source", cut=cut)

    def read(place: int, source: str) -> list[int]:
        return [*encode_source(place, source), EOS] if source.strip() else []

    return read


def prompt_reader(tokenizer: Tokenizer, prompts: Iterator[str], max_length: int) -> Callable[[int, str], list[int]]:
    """What `reader` makes of prompts, which leave room for a token; an empty one is refused."""
    encode_prompt = reader(tokenizer, prompts, max_length - 1, "prompt")

    def read(place: int, prompt: str) -> list[int]:
        row = encode_prompt(place, prompt)
        if not row:
            alone = place == 0 and next(prompts, None) is None
            raise ConfigError(f"{'the prompt' if alone else f'prompt {place + 1}'} is empty: {WRITE}")
        return row

    return read


def encode_one(tokenizer: Tokenizer, text: str, limit: int, name: str) -> list[int]:
    """Token ids of a text that errors call `name`.

    Raises:
        ConfigError: they are more than `limit`.
    """
    ids = tokenizer.encode(text)
    if len(ids) > limit:
        raise too_long(name, len(ids), limit)
    return ids


def too_long(name: str, tokens: int, limit: int) -> ConfigError:
    """What a text that the model has no room for is refused with."""
    return ConfigError(f"{name} has {tokens} tokens, but the model takes at most {limit}: shorten it")
