"""The examples of a corpus that are assigned to batches whole, in training and evaluation."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import grain

from tformer_jax.config import Config
from tformer_jax.config.task import task_of
from tformer_jax.data.columns import Block, PendingExample, split_block
from tformer_jax.data.corpora import Corpus, DataError
from tformer_jax.data.features import Tokenized, evaluation_converter, feature_converter
from tformer_jax.data.loading import LoadedBlocks
from tformer_jax.data.order import index_blocks, numbered_blocks
from tformer_jax.data.rows import (
    BLOCK,
    EvaluationPass,
    LengthReader,
    RowReader,
    Shards,
    bucket_sizes,
    id_reader,
    pending_reader,
    read_block,
)
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.transforms import build_transforms

if TYPE_CHECKING:
    from tformer_jax.data.distributions import Distributions
    from tformer_jax.data.stages import StagedOrder

DOCUMENTS = 8
"""Number of documents that are read together; fewer, since they may be long."""
MAX_UNUSABLE = 100_000
"""Number of successive examples without a usable one after which training ends."""


class TrainingExamples(NamedTuple):
    """The examples of training, to be assigned to batches."""

    lists: grain.IterDataset
    """Endless lists of pending examples, in the order of training."""
    rows: RowReader
    stages: "StagedOrder | None"
    """Counts the batches that are made of the examples; None: there are no stages."""


class ExampleBatches(grain.IterDataset):
    """Batches of examples.

    No example is dropped: the state of the iterator has the pending ones.

    Args:
        iterator: makes the iterator of batches from the iterator of the lists of examples.
    """

    def __init__(self, examples: TrainingExamples, iterator: Callable[[grain.DatasetIterator], grain.DatasetIterator]):
        super().__init__(examples.lists)
        self._iterator = iterator

    def __iter__(self) -> grain.DatasetIterator:
        return self._iterator(self._parent.__iter__())


def training_examples(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> TrainingExamples:
    """Returns the examples of training, and the reader of the rows of `shards`."""
    transforms = build_transforms(cfg, corpus, tokenizers)
    reader = id_reader(corpus.train, tokenizers, corpus.labels, transforms)
    convert = feature_converter(cfg, tokenizers)
    block = DOCUMENTS if task_of(cfg).documents else BLOCK
    weights: tuple[float, ...] = ()
    stages = None
    if cfg.data.stages:
        from tformer_jax.data.stages import example_stages

        sizes = bucket_sizes(cfg.data).values() if cfg.data.batching == "buckets" else [cfg.data.batch_size]
        block = min(block, *sizes)  # a stage ends between two blocks
        stages = example_stages(cfg, corpus, tokenizers, block)
    elif cfg.data.weights or cfg.data.temperature != 1 or cfg.data.upsampling is not None:
        from tformer_jax.data.mixtures import example_weights

        weights = example_weights(cfg, corpus, tokenizers)
    order = index_blocks if transforms is None else numbered_blocks
    blocks = order(corpus.sizes, weights, cfg.seed, block, stages)
    taught = _distributions(cfg, corpus, tokenizers)
    rows = RowReader(reader, convert, shards, taught)
    if not isinstance(reader, Tokenized):
        lengths = blocks.map(LengthReader(reader, convert, taught))
        return TrainingExamples(LoadedBlocks(lengths, 0, stages), rows, stages)
    loaded = LoadedBlocks(blocks.map(functools.partial(read_block, reader, convert)), cfg.data.workers, stages)
    return TrainingExamples(loaded.map(_UsableExamples(block)), rows, stages)


class _UsableExamples:
    """Splits blocks of `size` examples, without those that training drops, into examples.

    Raises:
        DataError: `MAX_UNUSABLE` examples in a row are dropped.
    """

    def __init__(self, size: int):
        self._size, self._dropped = size, 0

    def __call__(self, block: Block) -> list[PendingExample]:
        examples = split_block(block)
        self._dropped = 0 if examples else self._dropped + self._size
        if self._dropped < MAX_UNUSABLE:
            return examples
        raise DataError(
            f"{self._dropped:,} training examples in a row are blank or too long, as data.transforms change them: "
            "prepare_data.py --config FILE --show 10 shows some"
        )


def _distributions(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> "Distributions | None":
    """Opens the distributions of a teacher, if `train.teacher` names a folder of them."""
    if cfg.train.teacher is None:
        return None
    from tformer_jax.data.distributions import Distributions, is_stored

    return Distributions(cfg, corpus, tokenizers) if is_stored(cfg.train.teacher) else None


def evaluation_examples(cfg: Config, split: EvaluationPass) -> tuple[Iterator[PendingExample], RowReader]:
    """Returns the examples of a pass, and the reader of their rows."""
    reader, convert = split.reader, evaluation_converter(cfg, split.tokenizers)
    blocks = (split.indices[start : start + BLOCK] for start in range(0, len(split.indices), BLOCK))
    pending = itertools.chain.from_iterable(map(pending_reader(reader, convert), blocks))
    return pending, RowReader(reader, convert, split.shards)
