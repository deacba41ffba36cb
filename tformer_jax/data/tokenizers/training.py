"""Trains the vocabularies of an experiment on its training split."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers as hf
from rich.console import Console
from rich.progress import track

from tformer_jax import user_cache
from tformer_jax.config import DataConfig
from tformer_jax.data.corpora.cldr import Phrases
from tformer_jax.data.corpora.corpus import Example
from tformer_jax.data.tokenizers import simple, subword
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.imported import load_tokenizer
from tformer_jax.data.tokenizers.pair import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer

SETTINGS = ("tokenizer", "vocab_size", "tokenizer_examples", "split_digits", "shared_vocab")
"""Settings that determine a trained tokenizer; part of the cache key."""


def train_tokenizers(cfg: DataConfig, train: Iterable[Example], root: Path | None = None) -> Tokenizers:
    """Trains tokenizers on at most `cfg.tokenizer_examples` examples, or loads `cfg.tokenizer_file`.

    Tokenizers of generated corpora are cached in the user's cache folder.

    Args:
        train: the training split: a sequence, or an iterable for repeated passes.
        root: the data folder, to which `cfg.tokenizer_file` is relative.

    Raises:
        ConfigError: the vocabulary is too small for its kind, or the tokenizer file cannot be loaded.
    """
    if cfg.tokenizer == "file":
        assert cfg.tokenizer_file is not None
        tokenizer = load_tokenizer(Path(root or "") / cfg.tokenizer_file)
        return Tokenizers(tokenizer, tokenizer)
    if not isinstance(train, Phrases):
        return _train_sides(cfg, train)
    key = {
        "examples": train.origin(),
        "settings": {name: getattr(cfg, name) for name in SETTINGS},
        "tokenizers": hf.__version__,
        "code": user_cache.source_digest(sys.modules[__name__], simple, subword),
    }
    return Tokenizers.from_json(user_cache.cached("tokenizers", key, lambda: _train_sides(cfg, train).to_json()))


def _train_sides(cfg: DataConfig, train: Iterable[Example]) -> Tokenizers:
    keys = next(iter(train)).keys()
    sides = [key for key in keys if key != "label"]
    if cfg.shared_vocab or len(sides) == 1:
        shared = _train(cfg, train, sides)
        return Tokenizers(shared, shared)
    return Tokenizers(*(_train(cfg, train, [side]) for side in sides))


def _train(cfg: DataConfig, train: Iterable[Example], sides: Sequence[str]) -> Tokenizer:
    if cfg.tokenizer == "bytes":
        return ByteTokenizer()
    texts = (example[side] for example in _subsample(train, cfg.tokenizer_examples) for side in sides)
    if cfg.tokenizer in ("characters", "words"):
        kind = CharacterTokenizer if cfg.tokenizer == "characters" else WordTokenizer
        return kind.train(texts, cfg.vocab_size)
    return SubwordTokenizer.train(cfg.tokenizer, texts, cfg.vocab_size, split_digits=cfg.split_digits)


def _subsample(train: Iterable[Example], limit: int) -> Iterator[Example]:
    """Yields at most `limit` evenly spaced examples, with a progress bar on a terminal."""
    size = len(train) if isinstance(train, Sequence) else sum(1 for _ in train)
    count = min(size, limit)
    indices = (number * size // count for number in range(count))
    if isinstance(train, Sequence):
        examples: Iterator[Example] = (train[index] for index in indices)
    else:
        examples = _at(train, indices)
    console = Console(stderr=True)
    yield from track(
        examples,
        "reading examples for the tokenizer",
        total=count,
        console=console,
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def _at(examples: Iterable[Example], indices: Iterable[int]) -> Iterator[Example]:
    """Yields the examples at ascending indices."""
    iterator, consumed = iter(examples), 0
    for index in indices:
        yield next(itertools.islice(iterator, index - consumed, None))
        consumed = index + 1
