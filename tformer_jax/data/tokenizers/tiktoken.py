"""Tokenizers of the `tiktoken` library."""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tformer_jax.base.checks import import_extra
from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.base import FIRST, Tokenizer
from tformer_jax.special_tokens import UNK

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""GPT-2's pre-tokenization pattern ("Language Models are Unsupervised Multitask Learners", 2019, section 2.2)."""


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE of the `tiktoken` library with GPT-2's pre-tokenization; ids are shifted past the special tokens.

    Ranks that the file leaves out add no text.
    """

    kind = "tiktoken"

    def __init__(self, ranks: dict[bytes, int]):
        library = import_extra("this tokenizer", "tiktoken", "tokenizers")
        self._ranks = ranks
        self._encoding = library.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._tokens = {FIRST + rank: token for token, rank in ranks.items()}
        self.vocab_size = max(self._tokens) + 1

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        return [[FIRST + i for i in self._encoding.encode_ordinary(text)] for text in texts]

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        pieces = (unknown.encode() if i == UNK else self._tokens.get(i, b"") for i in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls({base64.b64decode(token): rank for token, rank in values["ranks"].items()})

    def describe(self) -> dict[str, Any]:
        """Returns the ranks by token in base 64."""
        return {"ranks": {base64.b64encode(token).decode(): rank for token, rank in self._ranks.items()}}

    @classmethod
    def from_file(cls, path: Path) -> Self:
        ranks = {}
        for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise UserError(f"data.tokenizer_file: {path}, line {number}: must be base64<space>rank") from error
        return cls(ranks)
