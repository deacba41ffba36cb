"""Tokenizers with further special tokens, which pre-training objectives need."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from tformer_jax.config.noise import SENTINELS
from tformer_jax.data.tokenizers.added import SENTINEL
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.special_tokens import SpecialTokens

MASK = "<mask>"
SENTINEL_TOKENS = tuple(map(SENTINEL.format, range(SENTINELS)))
SYNONYMS = {MASK: "[MASK]"}
"""Other names of these tokens in published vocabularies."""
ADDED = {"masked_tokens": (MASK,), "span_corruption": SENTINEL_TOKENS, "denoising": (MASK,)}
"""Special tokens that each `data.objective` needs."""


def mask_of(special: SpecialTokens) -> tuple[int, str] | None:
    """Returns the id and the name of the mask token; None if there is none."""
    ids = {name: i for i, name in special.names}
    return next(((ids[name], name) for name in (MASK, SYNONYMS[MASK]) if name in ids), None)


class ExtendedTokenizer:
    """Appends special tokens to the vocabulary of `tokenizer`; texts never have them."""

    kind = "extended"

    def __init__(self, tokenizer: Tokenizer, added: Sequence[str]):
        self.tokenizer, self.added = tokenizer, tuple(added)
        self.vocab_size = tokenizer.vocab_size + len(self.added)
        self.fallback_bytes = tokenizer.fallback_bytes
        names = (*tokenizer.special.names, *enumerate(self.added, tokenizer.vocab_size))
        self.special = dataclasses.replace(tokenizer.special, names=names)

    def encode(self, text: str) -> list[int]:
        """Encodes a text."""
        return self.tokenizer.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text as `encode` does."""
        return self.tokenizer.encode_batch(texts)

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes as `tokenizer` does, without the added tokens."""
        return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size], unknown=unknown)

    def to_json(self) -> dict[str, Any]:
        """Returns the kind, the names of the added tokens, and the JSON of the inner tokenizer."""
        return {"kind": self.kind, "added": list(self.added), "tokenizer": self.tokenizer.to_json()}

    @classmethod
    def of(cls, tokenizer: Tokenizer, needed: Sequence[str]) -> "ExtendedTokenizer":
        """Returns the tokenizer with those of the `needed` special tokens appended that it does not have."""
        found = tokenizer if isinstance(tokenizer, ExtendedTokenizer) else cls(tokenizer, ())
        known = {name for _, name in found.special.names}
        missing = (name for name in needed if not known & {name, SYNONYMS.get(name)})
        return cls(found.tokenizer, (*found.added, *missing))

    def id_of(self, name: str) -> int:
        """Returns the id of a needed token."""
        ids = {known: i for i, known in self.special.names}
        return ids[name] if name in ids else ids[SYNONYMS[name]]


def unextended(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer to whose vocabulary an `ExtendedTokenizer` appends, or `tokenizer` itself."""
    return tokenizer.tokenizer if isinstance(tokenizer, ExtendedTokenizer) else tokenizer
