"""The files in the data folder that an entry of `data.train`, `data.validation` or `data.test` names."""

import re
from pathlib import Path

from tformer_jax.config.fields import separated
from tformer_jax.data.corpora.corpus import DataError

HOMES = {
    "multi30k": "task 1 of the GitHub repository multi30k/dataset",
    "tiny_shakespeare": "data/tinyshakespeare/input.txt of the GitHub repository karpathy/char-rnn",
    "tatoeba_en_zh": "cmn-eng.zip of manythings.org/anki, as English<tab>Chinese lines",
    "debian_descriptions": "the Translation-* files of apt; configs/README.md says how to read yours",
    "rt_polarity": "Pang and Lee's sentence polarity dataset v1.0, as label<tab>sentence lines",
}
"""Origins of the shipped configs' corpora, by the first folder of their paths."""

WILDCARDS = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
"""Regular expressions of the wildcards of globs, except characters in brackets."""


def locate(root: Path | None, name: str) -> list[Path]:
    """Returns the files in the data folder that match a path or glob, sorted by name.

    Raises:
        DataError: no data folder is given, the path is a folder, the glob is invalid, or no file matches.
    """
    if not name:
        raise DataError("an entry of data.train, data.validation or data.test is empty: name a file")
    home = HOMES.get("".join(Path(name).parts[:1]))
    origin = f" (it comes from {home})" if home else ""
    if root is None and not Path(name).is_absolute():
        raise DataError(
            f"this config reads {name}{origin} below a data folder: name the folder with --data DIR "
            "or the environment variable TFORMER_DATA"
        )
    path = Path(root or "") / name
    if path.is_file():
        return [path]
    if path.is_dir():
        raise DataError(f"{path} is a folder: name a file in it, or a glob such as '*.gz' that matches its files")
    if path.exists():
        raise DataError(f"{path} is not a regular file, and it must be read more than once: copy it to a file")
    if any("**" in part and part != "**" for part in Path(name).parts):
        raise DataError(f"{name!r} is not a glob: write '**' only as a whole folder, such as '**/*.gz'")
    folder, glob = _split_anchor(root, name)
    named = _is_hidden(Path(glob))
    files = sorted(
        file for file in folder.glob(glob) if file.is_file() and (named or not _is_hidden(file.relative_to(folder)))
    )
    if not files:
        missing = "matches no file" if any(character in name for character in "*?[") else "does not exist"
        put = f"put it there, or name another folder with --data DIR{separated(name)}"
        raise DataError(f"{path} {missing}{origin}: {put}")
    return files


def _is_hidden(path: Path) -> bool:
    """Returns whether a part of a path has a name that begins with a dot."""
    return any(part.startswith(".") and part != ".." for part in path.parts)


def locate_by_wildcards(root: Path | None, name: str, language: str) -> dict[tuple[str, ...], Path]:
    """Returns the files of a language by the parts of their paths before, between and after its name."""
    folder, glob = _split_anchor(root, name)
    expression = re.escape(language).join(f"({_expression(part)})" for part in glob.split("{lang}"))
    paths = {}
    for path in locate(root, name.replace("{lang}", language)):
        match = re.fullmatch(expression, path.relative_to(folder).as_posix())
        paths[match.groups() if match else (name,)] = path  # a file may have brackets in its name
    return paths


def _split_anchor(root: Path | None, name: str) -> tuple[Path, str]:
    """Returns the folder to search, whose path is taken literally, and the glob relative to it."""
    path = Path(name)
    folder = Path(path.anchor or root or "")
    return folder, (path.relative_to(path.anchor) if path.anchor else path).as_posix()


def _expression(glob: str) -> str:
    parts = re.split(r"(\*\*/|\*|\?|\[.+?\])", glob)
    for number in range(1, len(parts), 2):
        characters = parts[number][1:-1].replace("\\", r"\\").replace("[", r"\[")
        parts[number] = WILDCARDS.get(parts[number]) or f"[{re.sub('^!', '^', characters)}]"
    parts[::2] = map(re.escape, parts[::2])
    return "".join(parts)
