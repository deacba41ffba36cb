"""Turns a corpus into batches: an endless, seeded, resumable stream for training, single passes for evaluation."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import grain
import numpy as np
from grain.experimental import index_shuffle

from tformer_jax.config import Config
from tformer_jax.config.task import task_of
from tformer_jax.data.bucketing import BucketBatches, bucket_sizes, bucketed_once
from tformer_jax.data.corpora import Corpus, DataError, Example, Joined
from tformer_jax.data.corpora.corpus import spread
from tformer_jax.data.loading import LoadedBlocks
from tformer_jax.data.mixtures import example_weights
from tformer_jax.data.objectives import CorruptedWindows, covering_corrupted, objective_of
from tformer_jax.data.packing import PackedBatches, packed_once
from tformer_jax.data.pending import of_block
from tformer_jax.data.prefetch import Batch, Prefetched
from tformer_jax.data.rows import (
    BLOCK,
    WHOLE_BATCH,
    BlockReader,
    IndexedReader,
    LengthReader,
    RowReader,
    Shards,
    id_reader,
    pending_reader,
)
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.transforms import Tokenized, document_end, evaluation_converter, feature_converter
from tformer_jax.data.windows import Windows, covering_windows, token_stream

DOCUMENTS = 8
"""Number of documents that are read together; fewer, since they may be long."""
SMALL = 1024
"""Number of examples below which a permutation of them is kept in memory."""
PREFETCHED_BATCHES = 8
TOKEN_KEYS = {"source", "target_in", "target_out", "tokens", "targets"}
"""Keys of a batch whose values are token ids."""


def train_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, *, shards: Shards = WHOLE_BATCH) -> Prefetched:
    """Returns endless training batches in an order that `cfg.seed` determines, reshuffled in each epoch.

    The iterator's `get_state` and `set_state` are exact: a restored iterator continues with the next batch. The
    sequence of global batches depends only on the config. Batches are formed by the lengths of examples, which
    prepared data stores, so that only the rows of `shards.own` are read; text is tokenized in every process.

    Args:
        shards: the shards of a global batch, and those whose rows the returned batches have.

    Raises:
        UserError: a batch does not divide into the shards, the data is shorter than one window, or there is
            BPE-dropout without a BPE.
        DataError: raised by the iterator for a token id outside the vocabulary.
    """
    check_divisible(cfg, shards.count)
    if cfg.data.bpe_dropout and not (tokenizers.source.is_bpe or tokenizers.target.is_bpe):
        raise cfg.data.error("bpe_dropout", "needs a BPE tokenizer, which the data does not have; write 0.0")
    dataset = (_window_batches if cfg.data.batching == "windows" else _example_batches)(cfg, corpus, tokenizers, shards)
    return Prefetched(iter(dataset.map(functools.partial(_check_ids, tokenizers))), PREFETCHED_BATCHES)


def evaluation_batches(
    cfg: Config,
    examples: Sequence[Example],
    tokenizers: Tokenizers,
    labels: tuple[str, ...] | None = None,
    *,
    limit: int = 0,
    shards: Shards = WHOLE_BATCH,
) -> Iterator[Batch]:
    """Yields every example once, in batches of `cfg.eval.batch_size` rows rounded up to a multiple of the shards.

    Batches have the rows of `shards.own` only, and only those are read from prepared data.

    Texts are evaluated completely, whatever the length of rows in training: documents longer than a packed row continue
    in further rows, and pairs and labeled texts are truncated only where the model cannot read more.

    Args:
        limit: number of examples, evenly spread; 0: all.
        shards: as in `train_batches`.

    Raises:
        DataError: a token id is outside the vocabulary.
    """
    batches = _evaluation_batches(cfg, id_reader(examples, tokenizers, labels), tokenizers, limit, shards)
    return (_check_ids(tokenizers, batch) for batch in batches)


def _evaluation_batches(
    cfg: Config, reader: IndexedReader | Tokenized, tokenizers: Tokenizers, limit: int, shards: Shards
) -> Iterator[Batch]:
    rows = -(-cfg.eval.batch_size // shards.count) * shards.count
    end = document_end(tokenizers.target)
    if cfg.data.objective:
        objective = objective_of(cfg.data, tokenizers.target)
        yield from covering_corrupted(token_stream(reader, end, limit), objective, rows, shards)
        return
    if cfg.data.batching == "windows":
        stream, prefix_lm = token_stream(reader, end, limit), cfg.model.prefix_lm
        yield from covering_windows(stream, cfg.data.window, rows, shards, prefix_lm=prefix_lm)
        return
    convert = evaluation_converter(cfg, tokenizers)
    read = RowReader(reader, convert, shards)
    indices = spread(len(reader), limit)
    blocks = (indices[start : start + BLOCK] for start in range(0, len(indices), BLOCK))
    pending = itertools.chain.from_iterable(map(pending_reader(reader, convert), blocks))
    if task_of(cfg).documents:
        yield from packed_once(pending, rows, _capacity(cfg), read)
    else:
        yield from bucketed_once(pending, rows, evaluation_lengths(cfg), read)


def evaluation_lengths(cfg: Config) -> list[int]:
    """Returns the lengths that rows of pairs and labeled texts are padded to in evaluation, up to the model's.

    They are the bucket lengths of training and further ones, so that a loss does not depend on the batching.
    """
    longest = cfg.model.max_length
    buckets = cfg.data.bucket_lengths if cfg.data.batching == "buckets" else ()
    powers = (2**n for n in range(4, longest.bit_length()))
    return sorted({*buckets, *(length for length in powers if length > max(buckets, default=0)), longest})


def check_predictable(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> None:
    """Raises `DataError` if a split has no token to predict.

    With windows, a split needs two tokens, because the first one is not predicted.
    """
    if cfg.data.batching != "windows":
        for split in ("train", "validation", "test"):
            if not any(_has_tokens(example, tokenizers) for example in getattr(corpus, split)):
                raise DataError(f"all examples of split {split} are empty or have no token: name other data")
        _check_fitting(cfg, corpus, tokenizers)
        return
    for split, limit in (("validation", cfg.eval.examples), ("test", 0)):
        reader, end = id_reader(getattr(corpus, split), tokenizers), document_end(tokenizers.target)
        tokens = len(token_stream(reader, end, min(limit or 3, 3)))  # three documents have two separators
        if tokens < 2:
            raise DataError(f"split {split} has fewer than 2 tokens, which evaluation needs: hold out more text")


def _check_fitting(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> None:
    """Raises `DataError` if all training pairs would be dropped for their length."""
    convert = feature_converter(cfg, tokenizers)
    convert.reported = True  # training reports what it drops
    if not convert.drop or not task_of(cfg).pairs:
        return
    reader = id_reader(corpus.train, tokenizers)
    blocks = (range(start, min(start + BLOCK, len(reader))) for start in range(0, len(reader), BLOCK))
    if not any(pending_reader(reader, convert)(block) for block in blocks):
        raise DataError(
            f"all pairs of split train are longer than {convert.source_length} or {convert.length} tokens: increase "
            f"{convert.settings[0]}, or set data.long_pairs='truncate'"
        )


def _has_tokens(example: Example, tokenizers: Tokenizers) -> bool:
    texts = {key: text for key, text in example.items() if key != "label"}
    return any((tokenizers.source if key == "source" else tokenizers.target).encode(texts[key]) for key in texts)


def _check_ids(tokenizers: Tokenizers, batch: Batch) -> Batch:
    """Returns the batch; raises `DataError` if one of its token ids is outside the vocabulary."""
    for name in TOKEN_KEYS & batch.keys():
        size = (tokenizers.source if name == "source" else tokenizers.target).vocab_size
        if (largest := batch[name].max()) >= size:
            raise DataError(
                f"the data contains token id {largest}, but the vocabulary has only {size} tokens: the data is damaged "
                "or was prepared with other tokenizers; prepare it again"
            )
    return batch


def check_divisible(cfg: Config, shards: int) -> None:
    """Raises `UserError` unless `shards` times `cfg.train.accumulate` micro-batches split every batch evenly."""
    name = "batch_multiple" if cfg.data.batching == "buckets" else "batch_size"
    if getattr(cfg.data, name) % shards:
        raise cfg.data.error(name, f"must be a multiple of the {shards} shards of a batch")
    if getattr(cfg.data, name) % (parts := shards * cfg.train.accumulate):
        factors = f"{shards} shards of a batch times train.accumulate={cfg.train.accumulate}"
        raise cfg.data.error(name, f"must be a multiple of {parts}: {factors}")


def _example_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> grain.IterDataset:
    reader, convert = (
        id_reader(corpus.train, tokenizers, corpus.labels, cfg.data.bpe_dropout),
        feature_converter(cfg, tokenizers),
    )
    sizes = corpus.train.sizes if isinstance(corpus.train, Joined) else [len(corpus.train)]
    weights = example_weights(cfg, corpus.train, tokenizers, corpus.labels)
    blocks = _index_blocks(sizes, weights, cfg.seed, DOCUMENTS if task_of(cfg).documents else BLOCK)
    if isinstance(reader, Tokenized):
        read = BlockReader(reader, convert)
        blocks = blocks.random_map(read, seed=cfg.seed) if cfg.data.bpe_dropout else blocks.map(read)
        examples = LoadedBlocks(blocks, cfg.data.workers).map(of_block)
    else:
        examples = LoadedBlocks(blocks.map(LengthReader(reader, convert)), workers=0)
    rows = RowReader(reader, convert, shards)
    if cfg.data.batching == "packed":
        return PackedBatches(examples, cfg.data.batch_size, _capacity(cfg), rows)
    return BucketBatches(examples, bucket_sizes(cfg.data), rows)


def _window_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> grain.IterDataset:
    parts = corpus.train.parts if isinstance(corpus.train, Joined) else [corpus.train]
    end = document_end(tokenizers.target)
    streams = [token_stream(id_reader(part, tokenizers), end) for part in parts]
    if cfg.data.objective:
        corrupted = CorruptedWindows(streams, objective_of(cfg.data, tokenizers.target), cfg.seed)
        blocks = _numbered_blocks(corrupted.sizes, cfg.data.weights, cfg.seed, cfg.data.batch_size).map(shards.select)
        return LoadedBlocks(blocks.map(corrupted.batch), cfg.data.workers)
    windows = [Windows(stream, cfg.data.window, prefix_lm=cfg.model.prefix_lm) for stream in streams]
    joined = Joined(windows)
    batches = _index_blocks(joined.sizes, cfg.data.weights, cfg.seed, cfg.data.batch_size).map(shards.select)
    if len(windows) == 1:
        batches = batches.map(windows[0].batch)
    else:
        batches = batches.map(functools.partial(_mixed_windows, joined))
    return LoadedBlocks(batches, cfg.data.workers)


def _mixed_windows(joined: Joined, indices: Sequence[int]) -> Batch:
    found = [joined.parts[part].batch([inside]) for part, inside in map(joined.locate, map(int, indices))]
    return {key: np.concatenate([window[key] for window in found]) for key in found[0]}


@functools.lru_cache(maxsize=64)
def shuffle_seed(seed: int, source: int, epoch: int) -> int:
    """Returns the uint32 seed of one epoch of one source: a BLAKE2b hash, so that each has an order of its own."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {source} {epoch}".encode(), digest_size=4).digest())


def _shuffled_index(index: int, size: int, seed: int) -> int:
    """Returns the element `index` of a permutation of `size` elements.

    `index_shuffle` needs no memory, but 9 ms for one of 2 elements (3 us for one of 29,000).
    """
    return int(_permutation(size, seed)[index]) if size < SMALL else index_shuffle(index, size - 1, seed, 4)


@functools.lru_cache(maxsize=64)
def _permutation(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


@dataclasses.dataclass(frozen=True)
class _Shuffled:
    """The indices from `start` to `start + size`, repeated endlessly and reshuffled in each epoch.

    Each is returned as the number `epoch * total + index`.
    """

    start: int
    size: int
    total: int
    seed: int
    source: int = 0

    def __call__(self, position: int) -> int:
        epoch, inside = divmod(int(position), self.size)
        shuffled = _shuffled_index(inside, self.size, shuffle_seed(self.seed, self.source, epoch))
        return epoch * self.total + self.start + shuffled

    def block(self, size: int, number: int) -> np.ndarray:
        """Returns the numbers of block `number` of `size` examples: int64 [size]."""
        return np.fromiter(map(self, range(number * size, (number + 1) * size)), np.int64, size)


def _index_blocks(sizes: Sequence[int], weights: Sequence[float], seed: int, block_size: int) -> grain.MapDataset:
    """Returns endless blocks of `block_size` example indices, reshuffled each epoch and mixed by `weights`, if any."""
    return _numbered_blocks(sizes, weights, seed, block_size).map(functools.partial(_indices, sum(sizes)))


def _indices(total: int, numbers: np.ndarray) -> np.ndarray:
    return numbers % total


def _numbered_blocks(sizes: Sequence[int], weights: Sequence[float], seed: int, block_size: int) -> grain.MapDataset:
    """Returns `_index_blocks` with numbers `epoch * sum(sizes) + index` in place of the indices."""
    ends = list(itertools.accumulate(sizes))
    endless = grain.MapDataset.range(2**48)
    if not weights:
        return endless.map(functools.partial(_Shuffled(0, ends[-1], ends[-1], seed).block, block_size))
    parts = [
        endless.map(_Shuffled(end - size, size, ends[-1], seed, number))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return grain.MapDataset.mix(parts, weights).batch(block_size)


def _capacity(cfg: Config) -> dict[str, int]:
    if task_of(cfg).documents:
        return {"tokens": cfg.data.window}
    return {"source": cfg.data.source_window or cfg.data.window, "target_in": cfg.data.window}
