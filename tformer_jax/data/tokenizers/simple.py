"""Tokenizers by bytes, characters and words."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from tformer_jax.data.tokenizers.base import FIRST, OneByOne, ordinary, with_context
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS, UNK


class ByteTokenizer(OneByOne):
    """One token per UTF-8 byte; the encoding is lossless for valid Unicode."""

    vocab_size = FIRST + 256
    special = DEFAULT_SPECIAL_TOKENS
    fallback_bytes: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of a text, shifted past the special tokens."""
        return [FIRST + byte for byte in text.encode("utf-8", "surrogatepass")]

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Inverts `encode`; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary are left out."""
        kept = (i for i in ordinary(ids, unknown=bool(unknown)) if i < self.vocab_size)
        return b"".join(unknown.encode() if i == UNK else bytes([i - FIRST]) for i in kept).decode("utf-8", "replace")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ByteTokenizer":
        """Restores the tokenizer from `to_json`."""
        return cls()

    def to_json(self) -> dict[str, Any]:
        """Returns the kind."""
        return {"kind": "bytes"}


class CharacterTokenizer(OneByOne):
    """One token per character of the training texts; other characters become UNK."""

    kind = "characters"
    separator = ""
    special = DEFAULT_SPECIAL_TOKENS
    fallback_bytes: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[str]):
        self.pieces = list(pieces)
        self._ids = {piece: FIRST + number for number, piece in enumerate(self.pieces)}
        self.vocab_size = FIRST + len(self.pieces)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "CharacterTokenizer":
        """Builds the vocabulary of all characters that occur, by code point; `vocab_size` does not limit it."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls(sorted(characters))

    def encode(self, text: str) -> list[int]:
        """Returns one id per piece."""
        ids = self._ids
        return [ids.get(piece, UNK) for piece in self.split(text)]

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Returns the pieces of the ids, without special tokens, joined by the separator."""
        kept = (i for i in ordinary(ids, unknown=bool(unknown)) if i < self.vocab_size)
        return self.separator.join(unknown if i == UNK else self.pieces[i - FIRST] for i in kept)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CharacterTokenizer":
        """Restores the tokenizer from `to_json`."""
        return cls(values["pieces"])

    def to_json(self) -> dict[str, Any]:
        """Returns the kind and the pieces in the order of their ids."""
        return {"kind": self.kind, "pieces": self.pieces}

    def split(self, text: str) -> Sequence[str]:
        """Splits a text into pieces."""
        return text


class WordTokenizer(CharacterTokenizer):
    """One token per whitespace-separated word; unknown words become UNK, and decoding writes single spaces."""

    kind = "words"
    separator = " "

    def __init__(self, pieces: Sequence[str]):
        super().__init__(pieces)
        self.special = with_context(self)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "WordTokenizer":
        """Builds the vocabulary of at most `vocab_size` tokens from the most frequent words."""
        counts = collections.Counter(word for text in texts for word in text.split())
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[: max(vocab_size - FIRST, 0)])

    def split(self, text: str) -> Sequence[str]:
        """Splits a text at whitespace."""
        return text.split()
