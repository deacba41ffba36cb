"""Tokenizers loaded from files: SentencePiece models, tiktoken ranks, and `tokenizer.json`."""

import base64
import binascii
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers as hf

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.data.tokenizers.base import (
    FIRST,
    UNKNOWN_MARK,
    OneByOne,
    Tokenizer,
    import_library,
    ordinary,
    with_context,
)
from tformer_jax.data.tokenizers.subword import SubwordTokenizer
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS, UNK

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""GPT-2's pre-tokenization pattern ("Language Models are Unsupervised Multitask Learners", 2019, section 2.2)."""


class SentencePieceTokenizer(OneByOne):
    """A SentencePiece model; its ids are shifted past the special tokens, and its unknown piece becomes UNK."""

    def __init__(self, model: bytes):
        sentencepiece = import_library("sentencepiece")
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._unknown = self._model.unk_id()
        size = self._model.get_piece_size()
        self.vocab_size = FIRST + size
        self.fallback_bytes = frozenset(FIRST + i for i in range(size) if self._model.is_byte(i))
        self.special = with_context(self)

    def encode(self, text: str) -> list[int]:
        """Encodes a text."""
        return [UNK if i == self._unknown else FIRST + i for i in self._model.encode(text)]

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes ids with the SentencePiece model."""
        kept = [i for i in ordinary(ids, unknown=bool(unknown)) if i < self.vocab_size]
        if UNK not in kept:
            return self._model.decode([i - FIRST for i in kept])
        pieces = [UNKNOWN_MARK if i == UNK else self._model.id_to_piece(i - FIRST) for i in kept]
        return self._model.decode_pieces(pieces).replace(UNKNOWN_MARK, unknown)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SentencePieceTokenizer":
        """Restores the tokenizer from `to_json`."""
        return cls(base64.b64decode(values["model"]))

    def to_json(self) -> dict[str, Any]:
        """Returns the model file in base 64."""
        return {"kind": "sentencepiece", "model": base64.b64encode(self._model.serialized_model_proto()).decode()}


class TiktokenTokenizer(OneByOne):
    """Byte-level BPE with GPT-2's pre-tokenization; ids are shifted past the special tokens."""

    special = DEFAULT_SPECIAL_TOKENS
    fallback_bytes: frozenset[int] = frozenset()

    def __init__(self, ranks: dict[bytes, int]):
        tiktoken = import_library("tiktoken")
        self._ranks = ranks
        self._encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self.vocab_size = FIRST + max(ranks.values()) + 1
        self._known = frozenset(FIRST + rank for rank in ranks.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return TiktokenTokenizer, (self._ranks,)

    def encode(self, text: str) -> list[int]:
        """Encodes a text."""
        return [FIRST + i for i in self._encoding.encode_ordinary(text)]

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes ids; invalid UTF-8 becomes U+FFFD, and ranks that the file leaves out add no text."""
        kept = (i for i in ordinary(ids, unknown=bool(unknown)) if i in self._known or i == UNK)
        single = self._encoding.decode_single_token_bytes
        text = b"".join(unknown.encode() if i == UNK else single(i - FIRST) for i in kept)
        return text.decode("utf-8", "replace")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TiktokenTokenizer":
        """Restores the tokenizer from `to_json`."""
        return cls({base64.b64decode(token): rank for token, rank in values["ranks"].items()})

    def to_json(self) -> dict[str, Any]:
        """Returns the ranks by token in base 64."""
        ranks = {base64.b64encode(token).decode(): rank for token, rank in self._ranks.items()}
        return {"kind": "tiktoken", "ranks": ranks}


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer from a `.json`, `.model` or `.tiktoken` file.

    Raises:
        UserError: the file is missing, damaged or of another format, or its library is not installed.
    """
    if not path.is_file():
        raise UserError(f"data.tokenizer_file: {path} does not exist")
    if path.suffix not in LOADERS:
        raise UserError(f"data.tokenizer_file: {path} must end in {' or '.join(LOADERS)}")
    try:
        return LOADERS[path.suffix](path)
    except UserError:
        raise
    except Exception as error:  # the libraries raise their own types, including bare Exception
        reason = first_line(error)
        raise UserError(f"data.tokenizer_file: {path} is not a valid {path.suffix} tokenizer ({reason})") from error


def _load_ranks(path: Path) -> TiktokenTokenizer:
    ranks = {}
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(f"data.tokenizer_file: {path}, line {number}: must be base64<space>rank") from error
    return TiktokenTokenizer(ranks)


LOADERS: dict[str, Callable[[Path], Tokenizer]] = {
    ".json": lambda path: SubwordTokenizer("file", hf.Tokenizer.from_file(str(path))),
    ".model": lambda path: SentencePieceTokenizer(path.read_bytes()),
    ".tiktoken": _load_ranks,
}
