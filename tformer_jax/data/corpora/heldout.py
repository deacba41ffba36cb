"""Which split a text belongs to, decided by the text alone: what is held out can never be trained on."""

import hashlib

HELDOUT_SHARE = 20
"""One text in so many belongs to validation, and one to test."""


def split_of(text: str) -> str:
    """`train`, `validation` or `test`, from a hash of the text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return {0: "validation", 1: "test"}.get(int.from_bytes(digest, "big") % HELDOUT_SHARE, "train")
