"""Batches of corrupted windows of token streams."""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.config import Config
from tformer_jax.data.bucketing import pad_batch
from tformer_jax.data.columns import TokenIds
from tformer_jax.data.corpora import Corpus, Joined
from tformer_jax.data.objectives import Objective, build_objective
from tformer_jax.data.order import numbered_blocks
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.rows import WHOLE_BATCH, Batching, EvaluationPass, Shards, TokenStream, token_stream
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.tokens import document_end
from tformer_jax.data.windows import loaded_windows, training_streams, window_stages


class CorruptedBatches(Batching):
    """Batches of corrupted windows of the texts, concatenated."""

    @staticmethod
    def train_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> grain.IterDataset:
        objective = build_objective(cfg.data, tokenizers.target)
        windows = CorruptedWindows(training_streams(corpus, tokenizers), objective, cfg.seed)
        stages = window_stages(cfg, windows.sizes, objective.tokens)
        blocks = numbered_blocks(windows.sizes, cfg.data.weights, cfg.seed, cfg.data.batch_size, stages)
        return loaded_windows(blocks.map(shards.select).map(windows.batch), cfg, stages)

    @staticmethod
    def evaluation_batches(cfg: Config, split: EvaluationPass) -> Iterator[Batch]:
        stream = token_stream(split.reader, document_end(split.tokenizers.target), split.indices)
        objective = build_objective(cfg.data, split.tokenizers.target)
        return covering_corrupted(stream, objective, split.rows, split.shards)


class CorruptedWindows:
    """The windows of streams by their number; each is corrupted anew in each epoch.

    What is corrupted is a function of the seed, the window and the epoch alone.

    Raises:
        UserError: a stream is shorter than one window.
    """

    def __init__(self, streams: Sequence[TokenStream], objective: Objective, seed: int):
        shortest = min(map(len, streams))
        if shortest < objective.tokens:
            raise UserError(
                f"data.window: the training text has {counted(shortest, 'token')}, fewer than one window needs "
                f"({objective.tokens}); write a smaller window"
            )
        self._streams, self._objective, self._seed = streams, objective, seed
        self._windows = Joined([range(len(stream) - objective.tokens + 1) for stream in streams])
        self.sizes = self._windows.sizes
        """Number of windows of each stream."""

    def batch(self, draws: Sequence[int]) -> Batch:
        """Returns rows of an objective by numbers `epoch * sum(sizes) + window`: int32 [rows, length] by key."""
        return pad_batch(map(self._row, draws), len(draws), self._objective.lengths)

    def _row(self, draw: int) -> TokenIds:
        epoch, window = divmod(int(draw), len(self._windows))
        part, offset = self._windows.locate(window)
        ids = self._streams[part][offset : offset + self._objective.tokens].astype(np.int32)
        return self._objective(ids, np.random.default_rng((self._seed, epoch, window)))


def covering_corrupted(
    stream: TokenStream, objective: Objective, rows: int, shards: Shards = WHOLE_BATCH
) -> Iterator[Batch]:
    """Yields this process's rows of batches that have each token of a stream in exactly one corrupted window.

    The corruption of a window is the same in all runs. A single token at the end is left out; missing rows are padding.
    """
    starts = range(0, len(stream) - 1, objective.tokens)
    for first in range(0, len(starts), rows):
        padded = [*starts[first : first + rows], *[None] * rows][:rows]
        own = [start for start in shards.select(padded) if start is not None]
        texts = (stream[start : start + objective.tokens].astype(np.int32) for start in own)
        examples = (objective(ids, np.random.default_rng(start)) for start, ids in zip(own, texts, strict=True))
        yield pad_batch(examples, rows // shards.count * len(shards.own), objective.lengths)
