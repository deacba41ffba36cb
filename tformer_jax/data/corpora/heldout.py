"""Assigns texts to splits by their hash, so that a held-out text is never trained on."""

import hashlib

HELDOUT_DIVISOR = 20
"""Validation and test each get one text in this many."""


def split_of(text: str) -> str:
    """Returns `train`, `validation` or `test`, depending on a hash of the text."""
    return {0: "validation", 1: "test"}.get(_hash(text) % HELDOUT_DIVISOR, "train")


def split_by_share(text: str, share: float) -> str:
    """As `split_of`; validation and test each get this share of the texts."""
    place = _hash(text) / 2**64
    return "validation" if place < share else "test" if place < 2 * share else "train"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
