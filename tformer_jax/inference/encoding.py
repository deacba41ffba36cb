"""From texts to token ids that a model has room for."""

from collections.abc import Callable, Iterator, Sequence

from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers import Tokenizer


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
