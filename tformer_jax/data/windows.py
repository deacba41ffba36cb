"""One long stream of tokens, cut into windows of equal length."""

import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tformer_jax.config import ConfigError
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.special_tokens import EOS, IGNORED, PAD


def token_stream(documents: Iterable[Example], tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of all documents in order, with EOS between two of them: int32 [tokens]."""
    pieces: list[np.ndarray] = []
    for document in documents:
        if pieces:
            pieces.append(np.array([EOS], np.int32))
        pieces.append(np.asarray(tokenizer.encode(document["text"]), np.int32))
    return np.concatenate(pieces)


class Windows(Sequence[dict[str, np.ndarray]]):
    """Every window of `length` tokens, by its offset; `targets` are the tokens one further on.

    With `prefix_lm`, a first part of random length (a function of the offset) is the `prefix`, whose tokens see each
    other and are not predicted ("Exploring the Limits of Transfer Learning ...", 2020, section 3.2.3).

    Raises:
        ConfigError: the stream has no room for one window.
    """

    def __init__(self, stream: np.ndarray, length: int, *, prefix_lm: bool = False):
        if len(stream) <= length:
            raise ConfigError(f"data.window={length}: the training text has only {len(stream)} tokens")
        self._stream, self._length, self._prefix_lm = stream, length, prefix_lm

    def __len__(self) -> int:
        return len(self._stream) - self._length

    def __getitem__(self, offset):
        window = self._stream[offset : offset + self._length + 1]
        if not self._prefix_lm:
            return {"tokens": window[:-1], "targets": window[1:]}
        prefix = random.Random(offset).randint(1, self._length)
        targets = np.where(np.arange(self._length) < prefix - 1, IGNORED, window[1:])
        return {"tokens": window[:-1], "targets": targets, "prefix": np.array(prefix, np.int32)}


def covering_windows(stream: np.ndarray, length: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches [rows, length] that predict every token but the first exactly once; the rest is padding."""
    batch_tokens = rows * length
    for start in range(0, len(stream) - 1, batch_tokens):
        part = stream[start : start + batch_tokens + 1]
        tokens, targets = np.full(batch_tokens, PAD, np.int32), np.full(batch_tokens, IGNORED, np.int32)
        tokens[: len(part) - 1], targets[: len(part) - 1] = part[:-1], part[1:]
        yield {"tokens": tokens.reshape(rows, length), "targets": targets.reshape(rows, length)}
