"""Files that Git LFS has not fetched: a clone without it has small text files in their places."""

from pathlib import Path

from tformer_jax.base.errors import UserError

BEGINNING = b"version https://git-lfs.github.com/spec/"


def check_fetched(path: Path) -> None:
    """Raises `UserError` if a file is a pointer of Git LFS; a missing file is none."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        pointer = file.read(len(BEGINNING)) == BEGINNING
    if pointer:
        raise UserError(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder")
