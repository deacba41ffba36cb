"""Downloads checkpoints from the Hugging Face hub."""

import re
from pathlib import Path

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.interop import companions

NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
FILE_SUFFIXES = (".pt", ".pth", ".bin", ".json", ".safetensors", ".gguf", ".npz")
"""Suffixes of files, which no model of the hub has in its name."""
FILES = ("*.safetensors", "*.json", "*.txt", "*.spm", "*.model", "*.jinja")
STATES = ("pytorch_model*.bin",)
"""Patterns of files that are downloaded if there is no safetensors file."""
OTHERS = ("*/*", "consolidated*")
"""Patterns of files that are not downloaded: other libraries' copies of the arrays."""
IN_FOLDERS = tuple(pattern for pattern in companions.FILES if "/" in pattern)
"""Patterns of files in folders, which `OTHERS` leaves out."""


def download(name: str) -> Path:
    """Downloads the files of a repository that are read, and returns the folder in the hub's cache.

    Raises:
        UserError: `name` is not a name such as "org/model", or the download fails.
    """
    if not NAME.fullmatch(name) or name.endswith(FILE_SUFFIXES):
        raise UserError(f"{name} does not exist: name a folder, a file, or a model of the Hugging Face hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f'{name} does not exist here, and downloading it needs huggingface_hub: pip install -e ".[interop]"'
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(FILES), ignore_patterns=list(OTHERS)))
        more = IN_FOLDERS if any(folder.glob("*.safetensors")) else (*IN_FOLDERS, *STATES)
        snapshot_download(name, revision=folder.name, allow_patterns=list(more))  # of the same commit
        return folder
    except Exception as error:  # types of the library and of its HTTP client, and OSError
        reason = first_line(error, 200).removeprefix("Got: ")
        raise UserError(
            f"{name} does not exist here, and downloading it from the Hugging Face hub failed: {reason}"
        ) from error
