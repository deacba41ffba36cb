"""Corpora by name: made on the spot, or read from files."""

from collections.abc import Callable
from pathlib import Path

from tformer_jax.config import DataConfig
from tformer_jax.data.corpora import cldr, files, stdlib
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example

__all__ = ["SOURCES", "Corpus", "DataError", "Example", "load_corpus"]

SOURCES: dict[str, Callable[[DataConfig, Path | None, int], Corpus]] = {
    "cldr_translation": lambda cfg, root, seed: cldr.translation(cfg, seed),
    "cldr_language": lambda cfg, root, seed: cldr.language(cfg, seed),
    "stdlib_text": lambda cfg, root, seed: stdlib.load(),
    "parallel_lines": lambda cfg, root, seed: files.parallel_lines(cfg, root),
    "tsv_pairs": lambda cfg, root, seed: files.tsv_pairs(cfg, root),
    "text": lambda cfg, root, seed: files.text(cfg, root),
    "labelled_tsv": lambda cfg, root, seed: files.labelled_tsv(cfg, root),
}


def load_corpus(cfg: DataConfig, root: Path | None, seed: int) -> Corpus:
    """The corpus that `cfg.source` names.

    Args:
        root: the data folder, for sources that read files.
        seed: of the corpora that are made.

    Raises:
        DataError: a file is missing, empty or malformed; the message names it, and the line.
    """
    return SOURCES[cfg.source](cfg, root, seed)
