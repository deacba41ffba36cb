"""One long stream of tokens, split into windows of equal length."""

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import grain
import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus, Joined
from tformer_jax.data.loading import LoadedBlocks
from tformer_jax.data.order import index_blocks
from tformer_jax.data.prefetch import Batch
from tformer_jax.data.rows import WHOLE_BATCH, Batching, EvaluationPass, Shards, TokenStream, id_reader, token_stream
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.tokens import document_end
from tformer_jax.special_tokens import IGNORED, PAD

if TYPE_CHECKING:
    from tformer_jax.data.stages import StagedOrder


class WindowBatches(Batching):
    """Batches of windows of the texts, concatenated."""

    @staticmethod
    def train_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, shards: Shards) -> grain.IterDataset:
        streams = training_streams(corpus, tokenizers)
        windows = [Windows(stream, cfg.data.window, prefix_lm=cfg.model.prefix_lm) for stream in streams]
        joined = Joined(windows)
        stages = window_stages(cfg, joined.sizes, cfg.data.window)
        blocks = index_blocks(joined.sizes, cfg.data.weights, cfg.seed, cfg.data.batch_size, stages).map(shards.select)
        read = windows[0].batch if len(windows) == 1 else functools.partial(_mix_windows, joined)
        return loaded_windows(blocks.map(read), cfg, stages)

    @staticmethod
    def evaluation_batches(cfg: Config, split: EvaluationPass) -> Iterator[Batch]:
        stream = token_stream(split.reader, document_end(split.tokenizers.target), split.indices)
        return covering_windows(stream, cfg.data.window, split.rows, split.shards, prefix_lm=cfg.model.prefix_lm)


def training_streams(corpus: Corpus, tokenizers: Tokenizers) -> list[TokenStream]:
    """Returns the tokens of each entry of the training split."""
    parts = corpus.train.parts if isinstance(corpus.train, Joined) else [corpus.train]
    return [token_stream(id_reader(part, tokenizers), document_end(tokenizers.target)) for part in parts]


def window_stages(cfg: Config, sizes: Sequence[int], length: int) -> "StagedOrder | None":
    """Returns the order of the windows of streams, if there are stages; each batch is a block.

    Args:
        sizes: number of windows of each stream, one for each of its tokens but the last `length` ones.
        length: number of tokens in a window.
    """
    if not cfg.data.stages:
        return None
    from tformer_jax.data.stages import DrawSizes, staged_order

    draw = DrawSizes.of_windows(cfg, [size + length for size in sizes], length)
    return staged_order(cfg, cfg.data.train, sizes, draw, cfg.data.batch_size)


def loaded_windows(blocks: grain.MapDataset, cfg: Config, stages: "StagedOrder | None") -> grain.IterDataset:
    """Returns the batches of windows, which are counted if there are stages."""
    batches = LoadedBlocks(blocks, cfg.data.workers, stages)
    if stages is None:
        return batches
    return batches.map(functools.partial(stages.count_and_return, cfg.data.tokens_per_batch))


def _mix_windows(joined: Joined, indices: Sequence[int]) -> Batch:
    windows = [joined.parts[part].batch([inside]) for part, inside in map(joined.locate, map(int, indices))]
    return {key: np.concatenate([window[key] for window in windows]) for key in windows[0]}


class Windows:
    """Windows of `length` tokens by their offset in a stream; `targets` are the tokens shifted by one.

    With `prefix_lm`, a random number of first tokens (a function of the offset) is the `prefix`: its tokens attend to
    each other in both directions and are not predicted ("Exploring the Limits of Transfer Learning ...", 2020,
    section 3.2.3).

    Raises:
        UserError: the stream is shorter than one window.
    """

    def __init__(self, stream: TokenStream, length: int, *, prefix_lm: bool = False):
        if len(stream) <= length:
            raise UserError(
                f"data.window={length}: the training text has {counted(len(stream), 'token')}, fewer than one window "
                f"needs ({length + 1}); write a smaller window"
            )
        self._stream, self._length, self._prefix_lm = stream, length, prefix_lm

    def __len__(self) -> int:
        return len(self._stream) - self._length

    def batch(self, offsets: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns the windows at some offsets: `tokens` and `targets` int32 [B, length], `prefix` int32 [B]."""
        indices = np.asarray(offsets)[:, None] + np.arange(self._length + 1)
        windows = self._stream[indices].astype(np.int32)
        tokens, targets = windows[:, :-1], windows[:, 1:]
        batch = {"tokens": tokens, "targets": targets}
        return with_prefixes(batch, offsets) if self._prefix_lm else batch


def with_prefixes(batch: dict[str, np.ndarray], offsets: Iterable[int]) -> dict[str, np.ndarray]:
    """Adds the `prefix` of each window, a function of its offset, and ignores the labels within it."""
    targets = batch["targets"]
    sizes = np.maximum((targets != IGNORED).sum(axis=1), 1)
    drawn = [random.Random(int(offset)).randint(1, int(size)) for offset, size in zip(offsets, sizes, strict=True)]
    prefix = np.array(drawn, np.int32)
    predicted = np.arange(targets.shape[1]) >= prefix[:, None] - 1
    return {**batch, "targets": np.where(predicted, targets, IGNORED), "prefix": prefix}


def covering_windows(
    stream: TokenStream, length: int, rows: int, shards: Shards = WHOLE_BATCH, *, prefix_lm: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this process's rows of batches [rows, length] that predict every token but the first once.

    The remainder is padding. With `prefix_lm`, the tokens of prefixes are not predicted, as in `Windows`.
    """
    own = shards.select(range(rows))
    for start in range(0, len(stream) - 1, rows * length):
        tokens = np.full((len(own), length), PAD, np.int32)
        targets = np.full((len(own), length), IGNORED, np.int32)
        for row, window in enumerate(own):
            part = stream[start + window * length :][: length + 1]
            size = max(len(part) - 1, 0)
            tokens[row, :size], targets[row, :size] = part[:-1], part[1:]
        batch = {"tokens": tokens, "targets": targets}
        yield with_prefixes(batch, [start + window * length for window in own]) if prefix_lm else batch
