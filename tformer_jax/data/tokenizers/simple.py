"""Tokenizers that need no merges: bytes, characters and words."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from tformer_jax.data.tokenizers.base import FIRST, ordinary
from tformer_jax.special_tokens import UNK


class ByteTokenizer:
    """One token a UTF-8 byte; every text has a round trip."""

    vocab_size = FIRST + 256
    fallback_bytes: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """The bytes of the text, each moved up past the special tokens."""
        return [FIRST + byte for byte in text.encode("utf-8", "surrogatepass")]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for each text."""
        return list(map(self.encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The inverse of `encode`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i - FIRST for i in ordinary(ids)).decode("utf-8", "replace")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ByteTokenizer":
        """What `to_json` described."""
        return cls()

    def to_json(self) -> dict[str, Any]:
        """Nothing but its kind."""
        return {"kind": "bytes"}


class CharacterTokenizer:
    """One token a character of the training text; other characters become UNK."""

    kind = "characters"
    joint = ""
    fallback_bytes: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[str]):
        self.pieces = list(pieces)
        self._ids = {piece: FIRST + number for number, piece in enumerate(self.pieces)}
        self.vocab_size = FIRST + len(self.pieces)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "CharacterTokenizer":
        """Every character that occurs, in the order of their code points; `vocab_size` is no limit here."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls(sorted(found))

    def encode(self, text: str) -> list[int]:
        """One id a piece."""
        ids = self._ids
        return [ids.get(piece, UNK) for piece in self.split(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for each text."""
        return list(map(self.encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The pieces side by side."""
        return self.joint.join(self.pieces[i - FIRST] for i in ordinary(ids) if i < self.vocab_size)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CharacterTokenizer":
        """What `to_json` described."""
        return cls(values["pieces"])

    def to_json(self) -> dict[str, Any]:
        """The pieces in the order of their ids."""
        return {"kind": self.kind, "pieces": self.pieces}

    def split(self, text: str) -> Sequence[str]:
        """The pieces of a text."""
        return text


class WordTokenizer(CharacterTokenizer):
    """One token a word between blanks; words outside the vocabulary become UNK, and runs of blanks one space."""

    kind = "words"
    joint = " "

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "WordTokenizer":
        """The most frequent words that `vocab_size` has room for, in this order."""
        counts = collections.Counter(word for text in texts for word in text.split())
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[: max(vocab_size - FIRST, 0)])

    def split(self, text: str) -> Sequence[str]:
        """The words of a text."""
        return text.split()
