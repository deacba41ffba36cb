"""The entries of a mixture: how often their examples are drawn, and the share of each in the tokens of training."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tformer_jax.config import Config
from tformer_jax.data.corpora import DataError, Example, Joined
from tformer_jax.data.corpora.corpus import spread
from tformer_jax.data.rows import BLOCK, id_reader, pending_reader
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.transforms import Tokenized, feature_converter

TOKENIZED = 10_000
"""Maximum number of examples of an entry whose tokens are counted."""
CHARACTERS = 4_000_000
"""Approximate maximum number of characters to tokenize for a count."""
COUNTED = ("source", "target_out", "tokens")
"""Features of an example whose tokens are counted: the target of a pair once."""


class Shares(NamedTuple):
    """Shares of the entries of a mixture in training: float64 [entries] each."""

    examples: np.ndarray
    tokens: np.ndarray


def example_weights(
    cfg: Config, train: Sequence[Example], tokenizers: Tokenizers, labels: tuple[str, ...] | None
) -> tuple[float, ...]:
    """Returns how often an example of each entry is drawn, in proportion; () to concatenate the entries.

    It depends only on the config, the corpus and its tokenizers, so that all processes and resumed runs agree.

    Raises:
        DataError: the examples of an entry add no token to batches, so that it can have no share in tokens.
    """
    weights = cfg.data.weights
    if not weights or cfg.data.weight_by == "examples":
        return weights
    means = mean_tokens(cfg, _entries(train), tokenizers, labels)
    for name, mean in zip(cfg.data.train, means, strict=True):
        if not mean:
            raise DataError(
                f"all examples of {name} that were read are blank or too long for their row, so that it cannot have a "
                "share of the tokens: leave it out of data.train, or set data.weight_by='examples'"
            )
    return tuple(weight / mean for weight, mean in zip(weights, means, strict=True))


def shares(cfg: Config, train: Joined, tokenizers: Tokenizers, labels: tuple[str, ...] | None) -> Shares:
    """Returns the share of each entry in the examples of training, and in its tokens.

    Windows of several entries have equal numbers of tokens; their share in examples is that of the texts in them.
    """
    weights = np.array(cfg.data.weights or train.sizes, float)
    means = np.array(mean_tokens(cfg, train.parts, tokenizers, labels))
    by_token = bool(cfg.data.weights) and (cfg.data.batching == "windows" or cfg.data.weight_by == "tokens")
    examples, tokens = (weights / means, weights) if by_token else (weights, weights * means)
    return Shares(examples / examples.sum(), tokens / (tokens.sum() or 1.0))


def mean_tokens(
    cfg: Config, entries: Sequence[Sequence[Example]], tokenizers: Tokenizers, labels: tuple[str, ...] | None
) -> list[float]:
    """Returns the mean number of tokens that an example of each entry adds to batches, from evenly spread examples.

    Special tokens are counted; what is dropped or truncated is not. BPE-dropout is not applied. With windows, the mean
    is that of whole texts.
    """
    return [_mean_tokens(cfg, entry, tokenizers, labels) for entry in entries]


def _mean_tokens(
    cfg: Config, examples: Sequence[Example], tokenizers: Tokenizers, labels: tuple[str, ...] | None
) -> float:
    reader = id_reader(examples, tokenizers, labels)
    tokenized = isinstance(reader, Tokenized)
    chosen = affordable(examples, TOKENIZED) if tokenized else spread(len(examples), TOKENIZED)
    blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
    if cfg.data.batching == "windows":
        return sum(int(reader.read(block)["text"].lengths.sum()) for block in blocks) / len(chosen)
    convert = feature_converter(cfg, tokenizers)
    convert.reported = True  # training reports what it drops or truncates
    read = pending_reader(reader, convert)
    pending = (example.lengths for block in blocks for example in read(block))
    return sum(lengths[key] for lengths in pending for key in COUNTED if key in lengths) / len(chosen)


def _entries(train: Sequence[Example]) -> Sequence[Sequence[Example]]:
    return train.parts if isinstance(train, Joined) else [train]


def affordable(examples: Sequence[Example], limit: int) -> Sequence[int]:
    """Returns the indices of evenly spread examples to tokenize: at most `limit`, fewer if they are long."""
    probe = spread(len(examples), 50)
    characters = sum(len(text) for index in probe for text in examples[index].values()) / max(len(probe), 1)
    return spread(len(examples), max(1, min(limit, int(CHARACTERS / max(characters, 1)))))
