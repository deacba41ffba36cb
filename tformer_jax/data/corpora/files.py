"""Corpora in files below the data folder: plain text, parallel lines and TSV, each plain or gzip-compressed."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

from tformer_jax.config import DataConfig
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example

HOMES = {
    "multi30k": "task 1 of the GitHub repository multi30k/dataset",
    "tiny_shakespeare": "data/tinyshakespeare/input.txt of the GitHub repository karpathy/char-rnn",
    "tatoeba_en_zh": "cmn-eng.zip of manythings.org/anki, as English<tab>Chinese lines",
    "rt_polarity": "Pang and Lee's sentence polarity dataset v1.0, as label<tab>sentence lines",
}
"""Where the corpora of the shipped configs come from, by the first folder of their path."""


def parallel_lines(cfg: DataConfig, root: Path | None) -> Corpus:
    """Translation pairs in two files, parallel by line number; `{lang}` in the path stands for the language."""

    def read(name: str) -> list[Example]:
        source = locate(root, name.format(lang=cfg.source_language))
        target = locate(root, name.format(lang=cfg.target_language))
        sources, targets = read_lines(source), read_lines(target)
        if len(sources) != len(targets):
            raise DataError(
                f"{source} has {len(sources)} lines but {target} has {len(targets)}: parallel files need equal numbers"
            )
        return [{"source": s, "target": t} for s, t in zip(sources, targets, strict=True)]

    return _corpus(cfg, read)


def tsv_pairs(cfg: DataConfig, root: Path | None) -> Corpus:
    """Translation pairs, `source<tab>target` on each line."""
    return _corpus(cfg, lambda name: _read_tsv(locate(root, name), ("source", "target")))


def labelled_tsv(cfg: DataConfig, root: Path | None) -> Corpus:
    """Classified texts, `label<tab>text` on each line; the labels are those of the training split, sorted."""
    corpus = _corpus(cfg, lambda name: _read_tsv(locate(root, name), ("label", "text")))
    labels = tuple(sorted({example["label"] for example in corpus.train}))
    for split in (corpus.validation, corpus.test):
        unknown = {example["label"] for example in split} - set(labels)
        if unknown:
            raise DataError(
                f"label {min(unknown)!r} of the held-out data does not occur in {cfg.train_file}, "
                f"which has {', '.join(labels)}"
            )
    return Corpus(corpus.train, corpus.validation, corpus.test, labels)


def text(cfg: DataConfig, root: Path | None) -> Corpus:
    """One document a file. Without a validation file, the last `validation_fraction` of the characters is held out."""

    def read(name: str) -> list[Example]:
        return [{"text": read_text(locate(root, name))}]

    assert cfg.train_file is not None
    train = read(cfg.train_file)
    if cfg.validation_file is None:
        document = train[0]["text"]
        boundary = int(len(document) * (1 - cfg.validation_fraction))
        train, validation = [{"text": document[:boundary]}], [{"text": document[boundary:]}]
    else:
        validation = read(cfg.validation_file)
    return Corpus(train, validation, read(cfg.test_file) if cfg.test_file else validation)


def locate(root: Path | None, name: str) -> Path:
    """The file `name` below the data folder.

    Raises:
        DataError: no folder was given, or the file is not there.
    """
    home = HOMES.get(Path(name).parts[0])
    origin = f" (it comes from {home})" if home else ""
    if root is None:
        raise DataError(
            f"this config reads {name}{origin} below a data folder: name the folder with --data DIR "
            "or the environment variable TFORMER_DATA"
        )
    path = root / name
    if not path.is_file():
        raise DataError(f"{path} does not exist{origin}: put it there, or name another folder with --data DIR")
    return path


def read_text(path: Path) -> str:
    """A whole file as text; a `.gz` file is decompressed.

    Raises:
        DataError: the file is empty, not gzip although called `.gz`, or not UTF-8.
    """
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is not a complete gzip file: {error}") from error
    if not raw.strip():
        raise DataError(f"{path} is empty")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not valid UTF-8; convert the file to UTF-8") from error


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without their line ends."""
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _corpus(cfg: DataConfig, read: Callable[[str], list[Example]]) -> Corpus:
    """The splits that `cfg` names, each read by `read`."""
    assert cfg.train_file is not None
    train = read(cfg.train_file)
    if cfg.validation_file is None:
        boundary = int(len(train) * (1 - cfg.validation_fraction))
        train, validation = train[:boundary], train[boundary:]
        if not train or not validation:
            raise DataError(f"{cfg.train_file} is too short to hold out data.validation_fraction of it")
    else:
        validation = read(cfg.validation_file)
    return Corpus(train, validation, read(cfg.test_file) if cfg.test_file else validation)


def _read_tsv(path: Path, columns: tuple[str, str]) -> list[Example]:
    examples = []
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split("\t")
        if len(cells) != len(columns):
            expected = "<tab>".join(columns)
            raise DataError(f"{path}, line {number}: has {len(cells)} columns where {expected} is expected")
        examples.append(dict(zip(columns, cells, strict=True)))
    return examples
