"""The tokenizer interface."""

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS, EOS, SPECIAL_TOKENS, UNK, SpecialTokens

FIRST = len(SPECIAL_TOKENS)
"""Id of the first token that is not special in this package's tokenizers."""
UNKNOWN_MARK = "\ufdd0"
"""A noncharacter of Unicode, which marks the place of an unknown token in a text while it is decoded."""


class Decoder(Protocol):
    """Converts token ids to text."""

    @property
    def special(self) -> SpecialTokens:
        """The special tokens."""
        ...

    @property
    def fallback_bytes(self) -> frozenset[int]:
        """Ids of byte-fallback tokens: single bytes, of which a run is decoded at once."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids before the first EOS token, skipping other special tokens."""
        ...


class Tokenizer(Decoder, Protocol):
    """Converts text to token ids and back."""

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes the ids before the first EOS token, skipping other special tokens.

        Args:
            unknown: text of an unknown token; empty: omit it.
        """
        ...

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V: ids are in [0, V)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without the special tokens around it.

        Names of special tokens are encoded as ordinary text, except by tokenizers of checkpoints, which read them.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text as `encode` does."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON from which `from_json` restores the tokenizer."""
        ...


def ordinary(ids: Iterable[int], *, unknown: bool = False) -> Iterator[int]:
    """Yields the ids before the first EOS, without special tokens, for this package's special tokens.

    Args:
        unknown: also yield the unknown token.
    """
    for i in ids:
        if i == EOS:
            return
        if i >= FIRST or (unknown and i == UNK):
            yield int(i)


def decode_tokens(library: hf.Tokenizer, tokens: Sequence[str]) -> str:
    """Decodes tokens, given as the library writes them in its vocabulary."""
    decoder = library.decoder
    return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))


def with_context(tokenizer: Tokenizer) -> SpecialTokens:
    """Returns this package's special tokens for a tokenizer that decodes tokens differently at the start of a text.

    `context` is a token with which an encoded text may end, and which has a text and is not a single byte.
    """
    texts = filter(None, (tokenizer.decode([i]) for i in range(FIRST, tokenizer.vocab_size)))
    last = (i for text in texts for i in tokenizer.encode(text)[-1:] if i not in tokenizer.fallback_bytes)
    return dataclasses.replace(DEFAULT_SPECIAL_TOKENS, context=next((i for i in last if tokenizer.decode([i])), None))


def token_texts(tokenizer: Decoder, ids: Iterable[int]) -> list[str]:
    """Returns the text of each id alone; special tokens by their names."""
    return [tokenizer.special.name(i) or tokenizer.decode([i]) for i in ids]


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Returns whether the ids that two tokenizers share have the same texts."""
    ids = range(min(one.vocab_size, other.vocab_size))
    return one is other or one.to_json() == other.to_json() or token_texts(one, ids) == token_texts(other, ids)


class OneByOne:
    """A tokenizer that encodes the texts of a batch one after another."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text as `encode` does."""
        return list(map(self.encode, texts))


def import_library(name: str, what: str = "this tokenizer") -> Any:
    """Imports a library of the extra `tokenizers`, which `what` needs.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f'{what} needs {name}: pip install -e ".[tokenizers]"') from None
