"""What forms batches from the examples of a corpus; the classes are in `kinds.BATCHINGS`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain

from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.features import Tokenized
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.rows import IndexedReader, Shards
from tformer_jax.data.tokenizers import Tokenizers


class EvaluationPass(NamedTuple):
    """One pass over a split for evaluation."""

    reader: IndexedReader | Tokenized
    tokenizers: Tokenizers
    indices: Sequence[int]
    """The examples to evaluate."""
    rows: int
    """Rows of a global batch, a multiple of the shards."""
    shards: Shards


class Batching:
    """Base of the kinds of batches, which hold the rows of this process only."""

    @staticmethod
    def train_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> grain.IterDataset:
        """Returns endless batches of the training split."""
        raise NotImplementedError

    @staticmethod
    def evaluation_batches(cfg: Config, split: EvaluationPass) -> Iterator[Batch]:
        """Yields batches that hold each example, or each token of documents, once."""
        raise NotImplementedError
