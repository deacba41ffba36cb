"""The entries of a mixture: how often their examples are drawn, and the share of each in the tokens of training."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus, DataError
from tformer_jax.data.corpora.corpus import Part, affordable
from tformer_jax.data.features import Tokenized, feature_converter
from tformer_jax.data.rows import BLOCK, IndexedReader, bucket_sizes, id_reader, pending_reader, row_capacity
from tformer_jax.data.tokenizers import Tokenizers

TOKENIZED = 10_000
"""Maximum number of examples of an entry, or of all directions, whose tokens are counted."""
LEAST = 500
"""Minimum number of examples of a direction whose tokens are counted, if it has as many."""
COUNTED = ("source", "target_out", "tokens")
"""Features of an example whose tokens are counted: the target of a pair once."""


class Shares(NamedTuple):
    """Shares of the entries of a mixture, or of directions, in training: float64 [entries] each."""

    examples: np.ndarray
    tokens: np.ndarray
    epochs: np.ndarray
    """Approximate number of times that each example is drawn in the steps of training."""


def direction_shares(sizes: Sequence[int], temperature: float, upsampling: float | None = None) -> np.ndarray:
    """Returns the probabilities of directions with these numbers of examples: float64 [directions].

    They are proportional to `sizes ** (1 / temperature)` ("Massively Multilingual Neural Machine Translation in the
    Wild", 2019, section 4.2), but at most `upsampling` times the share of a direction in the data.
    """
    data = np.array(sizes, float) / np.sum(sizes)
    scaled = data ** (1 / temperature)
    capped = np.zeros(len(data), bool)
    while True:
        free = np.where(capped, 0.0, scaled)
        room = 1 - (upsampling or 0.0) * data[capped].sum()
        result = np.where(capped, (upsampling or 0.0) * data, room * free / (free.sum() or 1.0))
        above = ~capped & (result > (np.inf if upsampling is None else upsampling) * data)
        if not above.any():
            return result
        capped |= above


def example_weights(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> tuple[float, ...]:
    """Returns how often an example of each entry or direction is drawn, in proportion; () to concatenate them.

    It depends only on the config, the corpus and its tokenizers, so that all processes and resumed runs agree.

    Raises:
        DataError: the examples of an entry add no token to batches, so that it can have no share in tokens.
    """
    weights = _drawn_shares(cfg, corpus)
    if not weights or cfg.data.weight_by == "examples":
        return weights
    means = mean_sizes(cfg, corpus, tokenizers).tokens.tolist()
    for name, mean in zip(corpus.directions or cfg.data.train, means, strict=True):
        if not mean:
            raise DataError(
                f"all examples of {name} that were read are blank or too long for their row, so that it cannot have a "
                "share of the tokens: leave it out of data.train, or set data.weight_by='examples'"
            )
    return tuple(weight / mean for weight, mean in zip(weights, means, strict=True))


def _drawn_shares(cfg: Config, corpus: Corpus) -> tuple[float, ...]:
    """Returns the weights of entries or directions; () if they are drawn as often as they occur."""
    if cfg.data.temperature == 1 and cfg.data.upsampling is None:
        return cfg.data.weights
    return tuple(direction_shares(corpus.sizes, cfg.data.temperature, cfg.data.upsampling).tolist())


def shares(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> Shares:
    """Returns the share of each entry or direction in the examples of training, and in its tokens.

    All windows have equal numbers of tokens; the share of an entry in the examples counts the texts in its windows.
    """
    weights = np.array(_drawn_shares(cfg, corpus) or corpus.sizes, float)
    means = mean_sizes(cfg, corpus, tokenizers)
    by_token = bool(cfg.data.weights) and (cfg.data.batching == "windows" or cfg.data.weight_by == "tokens")
    examples = weights / means.tokens if by_token else weights
    tokens = examples * means.tokens
    examples = examples / examples.sum()
    draws = cfg.train.steps / ((examples * means.batches).sum() or 1.0) * examples
    return Shares(examples, tokens / (tokens.sum() or 1.0), draws / np.array(corpus.sizes))


class MeanSizes(NamedTuple):
    """Mean sizes of an example of each entry or direction: float64 [entries] each."""

    tokens: np.ndarray
    """Number of tokens that an example adds to batches."""
    batches: np.ndarray
    """Part of a batch that an example fills, padding included."""


def mean_sizes(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> MeanSizes:
    """Returns the mean sizes of evenly spread examples.

    Special tokens are counted, dropped and truncated ones are not. Transforms are not applied. With windows, the means
    are over whole texts.
    """
    reader = id_reader(corpus.train, tokenizers, corpus.labels)
    limit = max(TOKENIZED // len(corpus.directions), LEAST) if corpus.directions else TOKENIZED
    means = []
    for size, end in zip(corpus.sizes, itertools.accumulate(corpus.sizes), strict=True):
        part = Part(corpus.train, range(end - size, end))
        chosen = affordable(part, limit)  # the same for prepared data, whose lengths are stored
        sizes = _sizes(cfg, reader, [part.indices[index] for index in chosen], tokenizers)
        means.append(np.sum(list(sizes), axis=0) / len(chosen) if sizes else np.zeros(2))
    return MeanSizes(*np.array(means).T)


def window_tokens(cfg: Config, tokenizers: Tokenizers) -> int:
    """Returns the number of tokens of texts in a window: `data.window`, and more for span corruption."""
    if not cfg.data.objective:
        return cfg.data.window
    from tformer_jax.data.objectives import build_objective

    return build_objective(cfg.data, tokenizers.target).tokens


def _sizes(
    cfg: Config, reader: IndexedReader | Tokenized, chosen: Sequence[int], tokenizers: Tokenizers
) -> list[tuple[float, float]]:
    """Returns the number of tokens of each chosen example, and the part of a batch that it fills."""
    blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
    rows = cfg.data.batch_size
    if cfg.data.batching == "windows":
        lengths = (float(length) for block in blocks for length in reader.read(block)["text"].lengths)
        window = window_tokens(cfg, tokenizers)
        return [(length, length / window / rows) for length in lengths]
    convert = feature_converter(cfg, tokenizers)
    convert.reported = True  # training reports what it drops or truncates
    read = pending_reader(reader, convert)
    sizes: list[tuple[float, float]] = []
    for example in (example for block in blocks for example in read(block)):
        longest = max(example.lengths.values())
        if cfg.data.batching == "buckets":
            part = next(1 / size for length, size in bucket_sizes(cfg.data).items() if longest <= length)
        else:
            part = max(example.lengths[key] / size for key, size in row_capacity(cfg).items()) / rows
        sizes.append((sum(example.lengths[key] for key in COUNTED if key in example.lengths), part))
    return sizes
