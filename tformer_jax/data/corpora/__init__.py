"""Corpora by the name of their source: generated, read from files, from TFDS, or prepared."""

from collections.abc import Callable
from pathlib import Path

from tformer_jax.config import Config
from tformer_jax.data.corpora import cldr, files, prepared, splits, stdlib
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example, Joined
from tformer_jax.data.corpora.splits import Splits

__all__ = ["Corpus", "DataError", "Example", "Joined", "Splits", "load_corpus", "stream_corpus"]


def _tfds(cfg: Config, root: Path | None) -> Corpus:
    from tformer_jax.data.corpora import tfds  # TFDS takes half a second to import

    return tfds.load(cfg, root)


SOURCES: dict[str, Callable[[Config, Path | None], Corpus]] = {
    "cldr_translation": lambda cfg, root: cldr.translation(cfg.data, cfg.seed),
    "cldr_language": lambda cfg, root: cldr.language(cfg.data, cfg.seed),
    "stdlib_text": lambda cfg, root: stdlib.load(),
    "tfds": _tfds,
    "prepared": prepared.load,
    **dict.fromkeys(files.KINDS, splits.load),
}


def load_corpus(cfg: Config, root: Path | None) -> Corpus:
    """Loads the corpus that `cfg.data` names, with random access.

    Args:
        root: the data folder, for sources in files.

    Raises:
        DataError: a file is missing, empty or malformed; the message names it, and the line.
    """
    return SOURCES[cfg.data.source](cfg, root)


def stream_corpus(cfg: Config, root: Path | None) -> Splits:
    """Opens the corpus that `cfg.data` names for sequential passes; files are read line by line."""
    if cfg.data.source in files.KINDS:
        return splits.stream(cfg, root)
    corpus = load_corpus(cfg, root)
    return Splits(corpus.train, corpus.validation, corpus.test, corpus.labels)
