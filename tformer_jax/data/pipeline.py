"""The way from a corpus to batches: an endless, seeded, resumable stream for training, single passes for evaluation."""

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from tformer_jax.config import Config
from tformer_jax.data.bucketing import BucketBatches, bucket_sizes, length_of, pad_batch, smallest_fitting
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.transforms import Encoder
from tformer_jax.data.windows import Windows, covering_windows, token_stream

Batch = dict[str, np.ndarray]

PREFETCHED_EXAMPLES = 256
PREFETCHED_BATCHES = 4


def train_batches(
    cfg: Config, corpus: Corpus, tokenizers: Tokenizers, *, multiple_of: int = 1
) -> grain.DatasetIterator[Batch]:
    """Endless training batches in an order that `cfg.seed` fixes, reshuffled in each epoch.

    The iterator's `get_state` and `set_state` are exact: a restored one continues with the very next batch.

    Args:
        multiple_of: number of examples that every batch size is a multiple of.

    Raises:
        ConfigError: the batch size does not allow that, or the data has not one window.
    """
    make = _window_batches if cfg.data.batching == "windows" else _bucket_batches
    dataset = make(cfg, corpus, tokenizers, multiple_of)
    if cfg.data.workers:
        options = grain.MultiprocessingOptions(num_workers=cfg.data.workers, per_worker_buffer_size=PREFETCHED_BATCHES)
        return iter(dataset.mp_prefetch(options))
    return iter(grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=PREFETCHED_BATCHES))


def evaluation_batches(
    cfg: Config,
    examples: Sequence[Example],
    tokenizers: Tokenizers,
    labels: tuple[str, ...] | None = None,
    *,
    multiple_of: int = 1,
) -> Iterator[Batch]:
    """Every example once, sorted by length, in batches of `cfg.eval.batch_size` rows rounded up to `multiple_of`."""
    rows = -(-cfg.eval.batch_size // multiple_of) * multiple_of
    if cfg.data.batching == "windows":
        yield from covering_windows(token_stream(examples, tokenizers.target), cfg.data.window, rows)
        return
    lengths = cfg.data.bucket_lengths
    encode = Encoder(tokenizers, lengths[-1], labels)
    encoded = sorted(map(encode, examples), key=length_of)
    for start in range(0, len(encoded), rows):
        chunk = encoded[start : start + rows]
        yield pad_batch(chunk, rows, smallest_fitting(lengths, length_of(chunk[-1])))


def _bucket_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, multiple_of: int) -> grain.IterDataset:
    sizes = bucket_sizes(cfg.data, multiple_of)
    encode = Encoder(tokenizers, cfg.data.bucket_lengths[-1], corpus.labels)
    examples = _shuffled(corpus.train, cfg.seed).map(encode)
    return BucketBatches(examples.to_iter_dataset(_read_options(PREFETCHED_EXAMPLES)), sizes)


def _window_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, multiple_of: int) -> grain.IterDataset:
    if cfg.data.batch_size % multiple_of:
        raise cfg.data.error("batch_size", f"must be a multiple of the {multiple_of} devices that share a batch")
    stream = token_stream(corpus.train, tokenizers.target)
    windows = Windows(stream, cfg.data.window, prefix_lm=cfg.model.prefix_lm)
    batches = _shuffled(windows, cfg.seed).batch(cfg.data.batch_size, drop_remainder=True)
    return batches.to_iter_dataset(_read_options(PREFETCHED_BATCHES))


def _shuffled(examples: Sequence[Any], seed: int) -> grain.MapDataset:
    return grain.MapDataset.source(examples).seed(seed).shuffle().repeat()


def _read_options(buffer: int) -> grain.ReadOptions:
    return grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffer)
