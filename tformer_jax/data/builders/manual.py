"""Reads files from TFDS's manual download folder and verifies their checksums."""

import hashlib
from typing import Any

from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError


def read_pinned(folder: Any, name: str, sha256: str) -> str:
    """Reads a file of the manual folder as text.

    Raises:
        FileNotFoundError: the file does not exist.
        NonMatchingChecksumError: the file has another checksum.
    """
    raw = (folder / name).read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != sha256:
        raise NonMatchingChecksumError(f"{folder / name} has the SHA-256 {digest}, not {sha256}")
    return raw.decode()
