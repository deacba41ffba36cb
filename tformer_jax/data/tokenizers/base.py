"""The tokenizer interface."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from tformer_jax.special_tokens import EOS, SPECIAL_TOKENS

FIRST = len(SPECIAL_TOKENS)
"""Id of the first token that is not special."""


class Tokenizer(Protocol):
    """Converts text to token ids and back. In every vocabulary, ids 0 to 3 are those of `special_tokens.py`."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V: ids are in [0, V)."""
        ...

    @property
    def fallback_bytes(self) -> frozenset[int]:
        """Ids of byte-fallback tokens: single bytes, of which a run is decoded at once."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without special tokens; the name of a special token is encoded as ordinary text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text as `encode` does."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids before the first EOS, skipping other special tokens."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON from which `from_json` restores the tokenizer."""
        ...


def ordinary(ids: Iterable[int]) -> Iterator[int]:
    """Yields the ids before the first EOS, without special tokens."""
    for i in ids:
        if i == EOS:
            return
        if i >= FIRST:
            yield int(i)


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Returns the text of each id alone; special tokens by their names."""
    return [SPECIAL_TOKENS[i] if i < FIRST else tokenizer.decode([i]) for i in ids]
