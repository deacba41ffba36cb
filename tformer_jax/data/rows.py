"""How examples are read, and which rows of a global batch one process prepares."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import grain
import numpy as np

from tformer_jax.config import Config, DataConfig
from tformer_jax.config.task import task_of
from tformer_jax.data.columns import Block, Column, PendingExample, TokenIds, split_block, split_examples
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.features import FeatureConverter, IdReader, Tokenized
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.special_tokens import EOS

if TYPE_CHECKING:
    from tformer_jax.data.corpora.array_records import StoredIds
    from tformer_jax.data.transforms.base import Transforms

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Shards:
    """Splits each global batch into `count` blocks of equal size; this process prepares the blocks `own`."""

    count: int = 1
    own: tuple[int, ...] = (0,)

    def select(self, rows: Sequence[T]) -> list[T]:
        """Selects this process's rows from all rows of a batch, in order."""
        size = len(rows) // self.count
        return [row for shard in self.own for row in rows[shard * size : (shard + 1) * size]]


def row_capacity(cfg: Config) -> dict[str, int]:
    """Returns the number of tokens of a packed row on each side."""
    if not task_of(cfg).pairs:
        return {"tokens": cfg.data.window}
    return {"source": cfg.data.source_window or cfg.data.window, "target_in": cfg.data.window}


def bucket_sizes(cfg: DataConfig) -> dict[int, int]:
    """Returns the number of examples per batch by bucket length.

    It is the largest multiple of `cfg.batch_multiple` within `cfg.batch_tokens`.
    """
    multiple = cfg.batch_multiple
    return {length: cfg.batch_tokens // length // multiple * multiple for length in cfg.bucket_lengths}


ORDER = "order"
"""Batch key of evaluations: the index in the split of each row that is not padding, int64 [<= rows]."""
BLOCK = 512
"""Number of examples that are read together."""
DOCUMENTS_PER_BLOCK = 256
"""Number of documents of a stream to tokenize at once."""
TokenStream: TypeAlias = "np.ndarray | StoredIds"
"""Token ids, int [tokens], in memory or in a file."""
WHOLE_BATCH = Shards()
"""The shards of a single process, which prepares all rows."""


@runtime_checkable
class IndexedReader(IdReader, Protocol):
    """Examples of prepared data, whose lengths are stored."""

    def lengths(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns the number of ids of each example by key: int64 [examples]."""

    def span(self, index: int, start: int, size: int) -> np.ndarray:
        """Returns `size` ids of a document from `start` on and the next one, or the EOS token: int32 [size + 1]."""


class LengthReader:
    """Turns indices into pending examples by their lengths alone, without reading ids.

    Args:
        taught: the `Distributions` of the labels, if they are stored.
    """

    def __init__(self, reader: IndexedReader, convert: FeatureConverter, taught: Any = None):
        self._reader, self._convert, self._taught = reader, convert, taught

    def __call__(self, indices: Sequence[int]) -> list[PendingExample]:
        sizes = self._reader.lengths(indices)
        blank = {key: Column(np.zeros(lengths.sum(), np.int32), lengths) for key, lengths in sizes.items()}
        features = {key: column.lengths.tolist() for key, column in self._convert(blank).items()}
        pieces = self._convert.pieces(sizes)
        owners = np.repeat(indices, pieces).tolist()
        numbers = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)).tolist()
        lengths = [dict(zip(features, row, strict=True)) for row in zip(*features.values(), strict=True)]
        if self._taught is not None:
            lengths = [self._taught.with_lengths(row) for row in lengths]
        return [PendingExample(row, None, *place) for row, *place in zip(lengths, owners, numbers, strict=True)]


class RowReader:
    """Reads the ids of the rows that one process prepares, and the distributions of their labels if they are stored."""

    def __init__(
        self, reader: IndexedReader | Tokenized, convert: FeatureConverter, shards: Shards, taught: Any = None
    ):
        self._reader, self._convert, self.shards, self._taught = reader, convert, shards, taught

    def ids(self, examples: Sequence[PendingExample]) -> list[TokenIds]:
        """Returns the ids of the features of examples, reading them if necessary."""
        ids = self._ids(examples)
        if self._taught is None:
            return ids
        rows = zip(examples, ids, strict=True)
        return [self._taught.with_places(example, row, self._convert.length) for example, row in rows]

    def complete(self, batch: Batch) -> Batch:
        """Returns a batch of examples, with the distributions of their labels if they are stored."""
        return batch if self._taught is None else self._taught.look_up(batch)

    def _ids(self, examples: Sequence[PendingExample]) -> list[TokenIds]:
        if isinstance(self._reader, Tokenized):
            return [example.ids for example in examples if example.ids is not None]
        if examples and "targets" in examples[0].lengths:
            length = self._convert.length
            places = ((each.position, each.piece * length, each.lengths["tokens"]) for each in examples)
            spans = [self._reader.span(*place) for place in places]
            return [{"tokens": ids[:-1], "targets": ids[1:]} for ids in spans]
        indices = sorted({example.position for example in examples})
        if not indices:
            return []
        ids = dict(zip(indices, split_examples(self._convert(self._reader.read(indices))), strict=True))
        return [ids[example.position] for example in examples]


def read_block(reader: IdReader, convert: FeatureConverter, indices: Sequence[int]) -> Block:
    """Reads a block of examples and converts them for the model."""
    return convert(reader.read(indices))


def pending_reader(
    reader: IndexedReader | Tokenized, convert: FeatureConverter
) -> Callable[[Sequence[int]], Sequence[PendingExample]]:
    """Returns a function from indices to pending examples, which reads only lengths if the reader stores them."""
    if isinstance(reader, Tokenized):
        return lambda indices: split_block(read_block(reader, convert, indices))
    return LengthReader(reader, convert)


def id_reader(
    examples: Sequence[Example],
    tokenizers: Tokenizers,
    labels: tuple[str, ...] | None = None,
    transforms: "Transforms | None" = None,
) -> IndexedReader | Tokenized:
    """Returns a reader of prepared ids; for text, and for prepared data with transforms, one that tokenizes."""
    if isinstance(examples, IndexedReader) and transforms is None:
        return examples
    return Tokenized(examples, tokenizers, labels, transforms)


def token_stream(documents: IdReader, end: int | None = EOS, indices: Sequence[int] | None = None) -> TokenStream:
    """Concatenates the tokens of the documents `indices` (None: all), separated by `end`; None: not separated."""
    indices = range(len(documents)) if indices is None else indices
    if len(indices) == len(documents) and (stream := getattr(documents, "stream", lambda: None)()) is not None:
        return stream
    parts = (indices[start : start + DOCUMENTS_PER_BLOCK] for start in range(0, len(indices), DOCUMENTS_PER_BLOCK))
    columns = (documents.read(part)["text"] for part in parts)
    if end is None:
        return np.concatenate([column.ids for column in columns])
    return np.concatenate([column.append(end).ids for column in columns])[:-1]


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
