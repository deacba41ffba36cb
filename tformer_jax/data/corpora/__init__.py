"""Corpora: generated, read from files, from TFDS, or prepared; `kinds.CORPORA` names them."""

import dataclasses
from pathlib import Path

from tformer_jax.config import Config, kinds
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example, Joined, Source, Splits

__all__ = ["Corpus", "DataError", "Example", "Joined", "Source", "Splits", "load_corpus", "stream_corpus"]


def load_corpus(cfg: Config, root: Path | None) -> Corpus:
    """Loads the corpus that `cfg.data` names, with random access.

    Args:
        root: the data folder, for sources in files.

    Raises:
        DataError: a file is missing, empty or malformed; the message names it, and the line.
    """
    source: type[Source] = kinds.load(kinds.CORPORA, cfg.data.source)
    return dataclasses.replace(source.load(cfg, root), root=root)


def stream_corpus(cfg: Config, root: Path | None) -> Splits:
    """Opens the corpus that `cfg.data` names for sequential passes; files are read line by line."""
    source: type[Source] = kinds.load(kinds.CORPORA, cfg.data.source)
    return source.stream(cfg, root)
