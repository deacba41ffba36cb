"""Files that a person puts into TFDS's manual folder, pinned by their checksum."""

import hashlib
from typing import Any

from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError


def pinned(folder: Any, name: str, sha256: str) -> str:
    """The text of a file in the manual folder.

    Raises:
        FileNotFoundError: it is not there.
        NonMatchingChecksumError: it is another file of that name.
    """
    raw = (folder / name).read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise NonMatchingChecksumError(f"{folder / name} has the SHA-256 {found}, not {sha256}")
    return raw.decode()
