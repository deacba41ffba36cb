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
from tformer_jax.data.tokenizers.imported import read_tokenizer
from tformer_jax.data.tokenizers.pair import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer

SETTINGS = ("tokenizer", "vocab_size", "tokenizer_examples", "split_digits", "shared_vocab")
"""The settings that a trained tokenizer follows from."""


def train_tokenizers(cfg: DataConfig, train: Iterable[Example], root: Path | None = None) -> Tokenizers:
    """What `cfg.tokenizer` names, trained on at most `cfg.tokenizer_examples` examples that are held one at a time.

    Those of a corpus that is made on the spot are kept in the user's cache folder.

    Args:
        train: the training split: a sequence, or what can be iterated over again and again.
        root: the data folder, below which `cfg.tokenizer_file` is looked for.

    Raises:
        ConfigError: the vocabulary is too small for its kind, or the file of a tokenizer cannot be read.
    """
    if cfg.tokenizer == "file":
        assert cfg.tokenizer_file is not None
        found = read_tokenizer(Path(root or "") / cfg.tokenizer_file)
        return Tokenizers(found, found)
    if not isinstance(train, Phrases):
        return _trained(cfg, train)
    key = {
        "examples": train.origin(),
        "settings": {name: getattr(cfg, name) for name in SETTINGS},
        "tokenizers": hf.__version__,
        "code": user_cache.source_digest(sys.modules[__name__], simple, subword),
    }
    return Tokenizers.from_json(user_cache.cached("tokenizers", key, lambda: _trained(cfg, train).to_json()))


def _trained(cfg: DataConfig, train: Iterable[Example]) -> Tokenizers:
    keys = next(iter(train)).keys()
    sides = [key for key in keys if key != "label"]
    if cfg.shared_vocab or len(sides) == 1:
        shared = _train(cfg, train, sides)
        return Tokenizers(shared, shared)
    return Tokenizers(*(_train(cfg, train, [side]) for side in sides))


def _train(cfg: DataConfig, train: Iterable[Example], sides: Sequence[str]) -> Tokenizer:
    if cfg.tokenizer == "bytes":
        return ByteTokenizer()
    texts = (example[side] for example in _chosen(train, cfg.tokenizer_examples) for side in sides)
    if cfg.tokenizer in ("characters", "words"):
        kind = CharacterTokenizer if cfg.tokenizer == "characters" else WordTokenizer
        return kind.train(texts, cfg.vocab_size)
    return SubwordTokenizer.train(cfg.tokenizer, texts, cfg.vocab_size, split_digits=cfg.split_digits)


def _chosen(train: Iterable[Example], limit: int) -> Iterator[Example]:
    """At most `limit` examples, evenly spaced, under a progress bar where there is a terminal."""
    size = len(train) if isinstance(train, Sequence) else sum(1 for _ in train)
    count = min(size, limit)
    places = (number * size // count for number in range(count))
    if isinstance(train, Sequence):
        found: Iterator[Example] = (train[place] for place in places)
    else:
        found = _at(train, places)
    console = Console(stderr=True)
    yield from track(
        found,
        "reading for the tokenizer",
        total=count,
        console=console,
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def _at(examples: Iterable[Example], places: Iterable[int]) -> Iterator[Example]:
    """The examples at rising places."""
    rest, passed = iter(examples), 0
    for place in places:
        yield next(itertools.islice(rest, place - passed, None))
        passed = place + 1
