"""Assigns texts to splits by their hash, so that a held-out text is never trained on."""

import hashlib

HELDOUT_DIVISOR = 20
"""Validation and test each get one text in this many."""


def split_of(text: str) -> str:
    """Returns `train`, `validation` or `test`, depending on a hash of the text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return {0: "validation", 1: "test"}.get(int.from_bytes(digest, "big") % HELDOUT_DIVISOR, "train")
