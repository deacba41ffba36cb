"""One long stream of tokens, split into windows of equal length."""

import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.data.corpora.corpus import spread
from tformer_jax.data.corpora.prepared import Records, StoredIds
from tformer_jax.data.rows import WHOLE_BATCH, Shards
from tformer_jax.data.transforms import IdReader
from tformer_jax.special_tokens import EOS, IGNORED, PAD

DOCUMENTS_PER_BLOCK = 256
"""Number of documents to tokenize at once."""
TokenStream = np.ndarray | StoredIds
"""Token ids, int [tokens], in memory or in a file."""


def token_stream(documents: IdReader, end: int | None = EOS, limit: int = 0) -> TokenStream:
    """Concatenates the tokens of `limit` evenly spread documents (0: all), separated by `end`; None: not separated."""
    indices = spread(len(documents), limit)
    stream = documents.stream() if isinstance(documents, Records) and len(indices) == len(documents) else None
    if stream is not None:
        return stream
    parts = (indices[start : start + DOCUMENTS_PER_BLOCK] for start in range(0, len(indices), DOCUMENTS_PER_BLOCK))
    columns = (documents.read(part)["text"] for part in parts)
    if end is None:
        return np.concatenate([column.ids for column in columns])
    return np.concatenate([column.append(end).ids for column in columns])[:-1]


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
                f"data.window={length}: the training text has {len(stream)} tokens, fewer than one window needs "
                f"({length + 1}); write a smaller window"
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
