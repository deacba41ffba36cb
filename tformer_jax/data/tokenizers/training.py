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
from tformer_jax.data.corpora.splits import no_example
from tformer_jax.data.tokenizers import normalization, simple, subword
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.extended import ADDED, ExtendedTokenizer
from tformer_jax.data.tokenizers.normalization import NormalizedTokenizer, normalizer
from tformer_jax.data.tokenizers.pair import Tokenizers, load_file, normalization_of
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer

SETTINGS = (
    *("tokenizer", "source_tokenizer", "target_tokenizer", "vocab_size", "tokenizer_examples"),
    *("split_digits", "shared_vocab", "normalize", "source_language", "target_language"),
)
"""Settings that determine a trained tokenizer; part of the cache key."""


def train_tokenizers(cfg: DataConfig, train: Iterable[Example], root: Path | None = None) -> Tokenizers:
    """Trains tokenizers on at most `cfg.tokenizer_examples` examples, or loads `cfg.tokenizer_file`.

    With `cfg.objective`, the special tokens that it needs are appended to the vocabulary.

    Tokenizers of generated corpora are cached in the user's cache folder.

    Args:
        train: the training split: a sequence, or an iterable for repeated passes.
        root: the data folder, to which `cfg.tokenizer_file` is relative.

    Raises:
        ConfigError: the vocabulary is too small for its kind, or the tokenizer file cannot be loaded.
        DataError: the training split has no example.
    """
    if cfg.tokenizer_file is not None and (folder := Path(root or "") / cfg.tokenizer_file).is_dir():
        return _of_folder(cfg, folder)
    if not isinstance(train, Phrases) or "file" in cfg.tokenizer_kinds:
        return _train_sides(cfg, train, root)
    key = {
        "examples": train.origin(),
        "settings": {name: getattr(cfg, name) for name in SETTINGS},
        "tokenizers": hf.__version__,
        "normalization": normalization.signature(cfg.normalize),
        "code": user_cache.source_digest(sys.modules[__name__], normalization, simple, subword),
    }
    return Tokenizers.from_json(user_cache.cached("tokenizers", key, lambda: _train_sides(cfg, train, root).to_json()))


def _of_folder(cfg: DataConfig, folder: Path) -> Tokenizers:
    """Loads the tokenizers of a run or a checkpoint."""
    if {*cfg.tokenizer_kinds} != {"file"}:
        raise cfg.error(
            "tokenizer_file", "is a folder with the tokenizers of both sides, but only one uses 'file'; name a file"
        )
    saved = folder / "tokenizers"
    if not (saved.is_dir() or (folder / "config.json").is_file()):
        raise cfg.error("tokenizer_file", f"{folder} is not the folder of a run or of a checkpoint")
    found = Tokenizers.load(saved) if saved.is_dir() else load_checkpoint_tokenizers(folder)
    for tokenizer in (found.source, found.target):
        _check_normalization(cfg, tokenizer)
    return _extended(cfg, found.source, found.target)


def checked(cfg: DataConfig, found: Tokenizers) -> Tokenizers:
    """Returns given tokenizers for data that `cfg` describes, with the special tokens of its objective.

    Raises:
        ConfigError: they do not normalize as `cfg` says.
    """
    for tokenizer in (found.source, found.target):
        if (steps := normalization_of(tokenizer)) != cfg.normalize:
            raise cfg.error("normalize", f"must be {steps!r}, as in the given tokenizers")
    return _extended(cfg, found.source, found.target)


def _extended(cfg: DataConfig, source: Tokenizer, target: Tokenizer) -> Tokenizers:
    """Returns the tokenizers with the special tokens that `cfg.objective` needs; its texts have one tokenizer."""
    if cfg.objective is None:
        return Tokenizers(source, target)
    extended = ExtendedTokenizer.of(target, ADDED[cfg.objective])
    return Tokenizers(extended, extended)


def _train_sides(cfg: DataConfig, train: Iterable[Example], root: Path | None) -> Tokenizers:
    first = next(iter(train), None)
    if first is None:
        raise no_example("train", train)
    sides = [key for key in first if key != "label"]
    languages = (cfg.source_language, cfg.target_language) if len(sides) == 2 else (cfg.source_language,)
    normalizers = {side: normalizer(cfg.normalize, language) for side, language in zip(sides, languages, strict=True)}

    def trained(kind: str, sides: Sequence[str]) -> Tokenizer:
        if kind == "file":
            assert cfg.tokenizer_file is not None
            loaded = load_file(Path(root or "") / cfg.tokenizer_file)
            if normalization_of(loaded):
                _check_normalization(cfg, loaded)
            return loaded
        examples = _subsample(train, cfg.tokenizer_examples)
        return _train(cfg, kind, (normalizers[side](example[side]) for example in examples for side in sides))

    if cfg.shared_vocab or len(sides) == 1:
        found = [trained(cfg.tokenizer_kinds[0], sides)] * len(sides)
    else:
        found = [trained(kind, [side]) for kind, side in zip(cfg.tokenizer_kinds, sides, strict=True)]
    if cfg.normalize:
        pairs = zip(found, languages, strict=True)
        found = [
            tokenizer if normalization_of(tokenizer) else NormalizedTokenizer(tokenizer, cfg.normalize, language)
            for tokenizer, language in pairs
        ]
    return _extended(cfg, found[0], found[-1])


def _check_normalization(cfg: DataConfig, tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` if `cfg` describes another normalization than that of a loaded tokenizer."""
    if cfg.normalize not in ((), steps := normalization_of(tokenizer)):
        also = f" or {steps!r}" if steps else ""
        raise cfg.error("normalize", f"must be (){also} for data.tokenizer_file={cfg.tokenizer_file!r}")


def _train(cfg: DataConfig, kind: str, texts: Iterator[str]) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind in ("characters", "words"):
        return (CharacterTokenizer if kind == "characters" else WordTokenizer).train(texts, cfg.vocab_size)
    return SubwordTokenizer.train(kind, texts, cfg.vocab_size, split_digits=cfg.split_digits)


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
        disable=sys.stderr is None or not sys.stderr.isatty(),
        transient=True,
    )


def _at(examples: Iterable[Example], indices: Iterable[int]) -> Iterator[Example]:
    """Yields the examples at ascending indices."""
    iterator, consumed = iter(examples), 0
    for index in indices:
        yield next(itertools.islice(iterator, index - consumed, None))
        consumed = index + 1
