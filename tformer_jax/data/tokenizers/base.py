"""What a tokenizer is."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from tformer_jax.special_tokens import EOS, SPECIAL_TOKENS

FIRST = len(SPECIAL_TOKENS)
"""The id of the first ordinary token."""


class Tokenizer(Protocol):
    """Text to ids and back. Ids 0 to 3 are the special tokens of `special_tokens.py` in every vocabulary."""

    @property
    def vocab_size(self) -> int:
        """V: ids are 0 ... V - 1."""
        ...

    @property
    def fallback_bytes(self) -> frozenset[int]:
        """Ids of single bytes in a vocabulary of texts ("byte fallback"): a run of them becomes text as a whole."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens; text that looks like a special token is ordinary text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as `encode` gives them."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first EOS; other special tokens are left out."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What `from_json` rebuilds the tokenizer from."""
        ...


def ordinary(ids: Iterable[int]) -> Iterator[int]:
    """The ids before the first EOS that are no special tokens."""
    for i in ids:
        if i == EOS:
            return
        if i >= FIRST:
            yield int(i)
