"""Length buckets: examples of similar length share a batch, and every batch has one of a few fixed shapes."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from tformer_jax.config import Config
from tformer_jax.data.columns import TAUGHT, PendingExample, PendingExamples, TokenIds
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.examples import ExampleBatches, TrainingExamples, evaluation_examples, training_examples
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.rows import ORDER, Batching, EvaluationPass, RowReader, Shards, bucket_sizes
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.special_tokens import IGNORED, PAD

LABELS = ("target_out", "targets", "label", "aligned", TAUGHT)
"""Batch keys padded with IGNORED; others are padded with PAD."""


def length_of(example: PendingExample) -> int:
    """Returns the length of the longest side of an example, in tokens."""
    return max(example.lengths.values())


def smallest_fitting(lengths: Sequence[int], length: int) -> int:
    """Returns the first of the ascending `lengths` that is at least `length`."""
    return next(bucket for bucket in lengths if length <= bucket)


def evaluation_lengths(cfg: Config) -> list[int]:
    """Returns the lengths that rows of pairs and labeled texts are padded to in evaluation, up to the model's.

    They are the bucket lengths of training and further ones, so that a loss does not depend on the batching.
    """
    longest = cfg.model.max_length
    buckets = cfg.data.bucket_lengths if cfg.data.batching == "buckets" else ()
    powers = (2**n for n in range(4, longest.bit_length()))
    return sorted({*buckets, *(length for length in powers if length > max(buckets, default=0)), longest})


class Buckets(Batching):
    """Batches of whole examples of similar length."""

    @staticmethod
    def train_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> grain.IterDataset:
        examples = training_examples(cfg, corpus, tokenizers, shards)
        sizes = bucket_sizes(cfg.data)
        return ExampleBatches(examples, lambda parent: BucketIterator(parent, sizes, examples))

    @staticmethod
    def evaluation_batches(cfg: Config, split: EvaluationPass) -> Iterator[Batch]:
        examples, read = evaluation_examples(cfg, split)
        return bucketed_once(examples, split.rows, evaluation_lengths(cfg), read)


def pad_batch(examples: Iterable[TokenIds], rows: int, lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Stacks examples into int32 [rows, length] by key, padded at the end; missing rows are padding."""
    fills = {key: IGNORED if key in LABELS else PAD for key in lengths}
    batch = {key: np.full((rows, length), fills[key], np.int32) for key, length in lengths.items()}
    for row, example in enumerate(examples):
        for key, array in batch.items():
            array[row, : len(example[key])] = example[key]
    return batch


def _bucket_batch(examples: Sequence[TokenIds], rows: int, length: int, keys: Iterable[str]) -> dict[str, np.ndarray]:
    """Stacks the `keys` of examples into int32 [rows, length]; labels of classes into int32 [rows]."""
    batch = pad_batch(examples, rows, {key: 1 if key == "label" else length for key in keys})
    return batch | {"label": batch["label"][:, 0]} if "label" in batch else batch


def bucketed_once(
    examples: Iterable[PendingExample], rows: int, lengths: Sequence[int], reader: RowReader
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this process's rows of batches that hold every example once, shortest first; last rows may be padding.

    Each batch has `ORDER`, too.
    """
    pending = list(examples)
    order = np.argsort([length_of(example) for example in pending], kind="stable")
    for start in range(0, len(order), rows):
        places = order[start : start + rows]
        longest = pending[places[-1]]
        own = reader.shards.select([pending[place] for place in places] + [None] * (rows - len(places)))
        ids = reader.ids([example for example in own if example is not None])
        batch = _bucket_batch(ids, len(own), smallest_fitting(lengths, length_of(longest)), longest.lengths)
        yield {**batch, ORDER: places}


class BucketIterator(grain.DatasetIterator):
    """Sorts a parent's pending examples into buckets and yields this process's rows when a bucket is full.

    Its state is the parent's state and the pending examples.
    """

    def __init__(self, parent: grain.DatasetIterator, sizes: dict[int, int], examples: TrainingExamples):
        super().__init__(parent)
        self._sizes, self._reader, self._stages = sizes, examples.rows, examples.stages
        self._lengths = sorted(sizes)
        self._buckets: dict[int, list[PendingExample]] = {length: [] for length in self._lengths}
        self._unsorted: collections.deque[PendingExample] = collections.deque()

    def __next__(self) -> dict[str, np.ndarray]:
        while True:
            if not self._unsorted:
                self._unsorted.extend(next(self._parent))
                continue
            example = self._unsorted.popleft()
            length = smallest_fitting(self._lengths, length_of(example))
            bucket = self._buckets[length]
            bucket.append(example)
            if len(bucket) == self._sizes[length]:
                self._buckets[length] = []
                if self._stages is not None:
                    self._stages.count_examples(bucket)
                own = self._reader.shards.select(bucket)
                return self._reader.complete(_bucket_batch(self._reader.ids(own), len(own), length, example.lengths))

    def get_state(self) -> dict[str, Any]:
        """Returns the state between two batches; `columns.jsonable` converts it to JSON."""
        buckets = {str(length): PendingExamples(bucket) for length, bucket in self._buckets.items()}
        return {"parent": self._parent.get_state(), "buckets": buckets, "unsorted": PendingExamples(self._unsorted)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the batches that followed `get_state`."""
        self._parent.set_state(state["parent"])
        self._buckets = {
            length: list(PendingExamples.restored(state["buckets"][str(length)])) for length in self._lengths
        }
        self._unsorted = collections.deque(PendingExamples.restored(state["unsorted"]))
