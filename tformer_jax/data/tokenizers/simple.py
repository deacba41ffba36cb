"""Tokenizers by bytes, characters and words, and of token ids."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any, Self

import tokenizers as hf

from tformer_jax.config import DataConfig
from tformer_jax.data.characters import frequent_characters
from tformer_jax.data.tokenizers.base import FIRST, Tokenizer, with_context
from tformer_jax.data.tokenizers.notation import byte_names
from tformer_jax.special_tokens import SPECIAL_TOKENS, UNK

WHITESPACE = r"\s\x1C-\x1F"
"""What `str.split` splits at, within brackets; in the library's patterns, `\\s` lacks four separators of ASCII."""


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte; the encoding is lossless for valid Unicode."""

    kind = "bytes"
    settings = ("split_digits",)
    vocab_size = FIRST + 256

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> Self:
        return cls()

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        return [[FIRST + byte for byte in text.encode("utf-8", "surrogatepass")] for text in texts]

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        pieces = (unknown.encode() if i == UNK else bytes([i - FIRST]) for i in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def describe(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls()

    def to_library(self) -> hf.Tokenizer:
        library = _with_special_tokens(hf.models.BPE(_vocabulary(byte_names()), []))
        library.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = hf.decoders.ByteLevel()
        return library


class PieceTokenizer(Tokenizer):
    """Base class of tokenizers whose tokens are the pieces of training texts; other pieces become UNK."""

    def __init__(self, pieces: Sequence[str]):
        self.pieces = list(pieces)
        self._ids = {piece: FIRST + number for number, piece in enumerate(self.pieces)}
        self.vocab_size = FIRST + len(self.pieces)

    @staticmethod
    def split(text: str) -> Sequence[str]:
        """Splits a text into pieces."""
        raise NotImplementedError

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> Self:
        """Builds the vocabulary of at most `cfg.vocab_size` tokens from the most frequent pieces."""
        counts = collections.Counter(piece for text in texts for piece in cls.split(text))
        ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
        return cls(ranked[: max(cfg.vocab_size - FIRST, 0)])

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        ids = self._ids
        return [[ids.get(piece, UNK) for piece in self.split(text)] for text in texts]

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        return self.separator.join(unknown if i == UNK else self.pieces[i - FIRST] for i in ids)

    def describe(self) -> dict[str, Any]:
        return {"pieces": self.pieces}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(values["pieces"])

    def vocabulary(self) -> tuple[str, dict[str, int]]:
        return self.kind, self._ids

    def _is_written(self) -> bool:
        """Returns whether the `tokenizers` library can hold the pieces: none has the name of a special token."""
        return not {*self.pieces} & {*SPECIAL_TOKENS}


class CharacterTokenizer(PieceTokenizer):
    """One token per character of the training texts."""

    kind = "characters"
    settings = ("tokenizer_examples", "split_digits", "character_coverage")

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> Self:
        """Builds the vocabulary of the characters that occur, by code point; `cfg.vocab_size` does not limit it."""
        if cfg.character_coverage is not None:
            return cls(frequent_characters(texts, cfg.character_coverage))
        return cls(sorted({character for text in all_texts for character in text}))

    @staticmethod
    def split(text: str) -> Sequence[str]:
        return text

    def to_library(self) -> hf.Tokenizer | None:
        if not self._is_written():
            return None
        unknown = SPECIAL_TOKENS[UNK]
        library = _with_special_tokens(hf.models.BPE(_vocabulary(self.pieces), [], unk_token=unknown))
        library.decoder = hf.decoders.Fuse()
        return library


class WordTokenizer(PieceTokenizer):
    """One token per whitespace-separated word; decoding writes single spaces."""

    kind = "words"
    separator = " "

    def __init__(self, pieces: Sequence[str]):
        super().__init__(pieces)
        self.special = with_context(self)

    @staticmethod
    def split(text: str) -> Sequence[str]:
        return text.split()

    def to_library(self) -> hf.Tokenizer | None:
        if not self._is_written():
            return None
        unknown = SPECIAL_TOKENS[UNK]
        library = _with_special_tokens(hf.models.WordLevel(_vocabulary(self.pieces), unk_token=unknown))
        reserved = "|".join(name for name in SPECIAL_TOKENS if name != unknown)
        symbols = list(map(re.escape, self.symbols))
        start = "|".join([f"(?<![^{WHITESPACE}])", *(f"(?<={symbol})" for symbol in symbols)])
        stop = "|".join([f"(?![^{WHITESPACE}])", *(f"(?={symbol})" for symbol in symbols)])
        words = f"(?:{start})({reserved})(?:{stop})"  # unknown, although the vocabulary has them
        library.normalizer = hf.normalizers.Replace(hf.Regex(words), unknown)
        library.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(f"[{WHITESPACE}]+"), "removed")
        return library  # without a decoder, the library joins tokens with spaces


class IdTokenizer(WordTokenizer):
    """Texts are token ids of one's own, from 0: decimal numbers between spaces; the special tokens come before them."""

    kind = "ids"
    settings = ("vocab_size",)

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> Self:
        """Builds the vocabulary of the ids below `cfg.vocab_size` - FIRST; raises `UserError` for other words."""
        result = cls(list(map(str, range(cfg.vocab_size - FIRST))))
        for word in (word for text in all_texts for word in cls.split(text) if word not in result._ids):
            is_id = word.isdecimal() and len(word) < 10 and word == str(int(word))
            needed = f"write at least {int(word) + 1 + FIRST}" if is_id else "write each id as a number from 0"
            held = f"{cfg.vocab_size} holds the ids 0 to {cfg.vocab_size - FIRST - 1} for data.tokenizer='ids'"
            raise cfg.error("vocab_size", f"{held}, but the training split has {word!r}; {needed}")
        return result


def _vocabulary(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate((*SPECIAL_TOKENS, *pieces))}


def _with_special_tokens(model: hf.models.Model) -> hf.Tokenizer:
    library = hf.Tokenizer(model)
    library.add_special_tokens(list(SPECIAL_TOKENS))
    return library
