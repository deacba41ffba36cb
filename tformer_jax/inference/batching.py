"""Batches of few shapes, with results in the order of the inputs."""

import abc
import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.parallel.placement import mesh_of, shard_batch, use_whole_mesh
from tformer_jax.special_tokens import PAD

Item = TypeVar("Item")
Row = TypeVar("Row")
Result = TypeVar("Result")

ROWS_PER_CHUNK = 1024
"""Number of rows of a stream that are in memory at once. A resumed command computes a chunk from its start."""

WINDOW = 4
"""Number of batches of consecutive texts that are ordered by length, so that texts of similar length are read together.

Larger windows are faster; smaller ones yield the first outputs earlier.
"""

MIN_LENGTH = 16
"""Minimum length of a batch in tokens: compiling shorter ones separately would gain little."""


class TextProcessor(abc.ABC, Generic[Item, Row, Result]):
    """Computes one result for each of any number of texts.

    Args:
        cfg: the batch size and the maximum length.
    """

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers):
        self.cfg, self.model, self.tokenizers = cfg, model, tokenizers

    def stream(
        self, params: Any, texts: Iterable[Item], *, skip: int = 0, long_texts: LongTexts | None = None
    ) -> Iterator[Result]:
        """Yields the result of each text, in order; see the class for its type.

        Args:
            texts: read as needed.
            skip: number of first texts to omit; it does not change the other results.
            long_texts: what to do with texts that are too long; default: raise an error. A text that is left out has
                the result of an empty text.

        Raises:
            UserError: raised by `texts`; the results of all earlier texts are yielded first.
            TextError: the model cannot process a text; as above.
        """
        encode = functools.partial(self._encode, long_texts or LongTexts())
        size = WINDOW * self.cfg.eval.batch_size
        return run_in_chunks(texts, encode, functools.partial(self._compute, params), skip=skip, size=size)

    @abc.abstractmethod
    def _encode(self, long_texts: LongTexts, index: int, text: Item) -> Row:
        """Returns the row of text `index`."""

    @abc.abstractmethod
    def _compute(self, params: Any, rows: list[Row]) -> Iterable[Result]:
        """Computes one result per row."""


def run_in_batches(
    lengths: Sequence[int],
    run: Callable[[np.ndarray, int], Iterable[Result]],
    *,
    size: int,
    max_length: int,
) -> Iterator[Result]:
    """Calls `run` on batches of rows of similar length, and yields its results in the order of the rows.

    A result is yielded as soon as the results of all earlier rows are known.

    Args:
        lengths: number of tokens of each row, from 0 to `max_length`.
        run: maps indices of rows, int32 [B], and the length T to pad the rows to, to one result per row. Repeated rows
            fill up a batch, and their results are dropped. T is a power of two, or `max_length`.
        size: maximum B; all calls have the same B.
    """
    results: dict[int, Result] = {}
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    size = min(size, power_of_two(len(lengths)))
    done = 0
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        T = min(power_of_two(max(lengths[indices[-1]], MIN_LENGTH)), max_length)
        results.update(zip(indices, run(np.resize(np.array(indices, np.int32), size), T), strict=False))
        while done in results:
            yield results.pop(done)
            done += 1


def compute_rows(
    function: Callable[[nn.Module, Any, Mapping[str, Any]], Any],
    model: nn.Module,
    params: Any,
    rows: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
) -> Iterator[Any]:
    """Yields the row of each leaf of `function(model, params, batch)`, as NumPy arrays, in the order of the rows.

    Args:
        function: called with batches of token ids, int32 [B, T] by batch key with PAD on the right, on the mesh of
            `params`; returns arrays [B, ...].
        rows: token ids of each row by batch key; `prefix` has one number.
        batch_size: maximum B.
    """
    mesh = mesh_of(params)

    def run(indices: np.ndarray, T: int) -> Iterator[Any]:
        batch = pad_inputs([rows[index] for index in indices], len(indices), T)
        with use_whole_mesh(mesh):
            results = jax.device_get(function(model, params, shard_batch(mesh, batch)))
        return (jax.tree.map(operator.itemgetter(number), results) for number in range(len(indices)))

    lengths = [max(map(len, row.values())) for row in rows]
    return run_in_batches(lengths, run, size=batch_size, max_length=model.cfg.max_length)


def run_in_chunks(
    items: Iterable[Item],
    read: Callable[[int, Item], Row],
    run: Callable[[list[Row]], Iterable[Result]],
    *,
    skip: int = 0,
    size: int | None = None,
) -> Iterator[Result]:
    """Processes a stream of items in chunks of `size`, and yields their results in order.

    Args:
        read: maps the index of an item, from 0, and the item to a row.
        run: maps rows to one result per row; each is yielded as soon as `run` yields it.
        skip: number of first results to omit; the other results are bit-identical for any `skip` if the results of a
            chunk do not depend on other chunks.
        size: default: `ROWS_PER_CHUNK`.

    Raises:
        UserError: raised by `items` or `read`; the results of all earlier items are yielded first.
    """
    items, size = iter(items), size or ROWS_PER_CHUNK
    start = skip - skip % size
    collections.deque(itertools.islice(items, start), maxlen=0)
    rows = map(read, itertools.count(start), items)
    while True:
        chunk, error = _take(rows, size)
        yield from itertools.islice(run(chunk), max(skip - start, 0), None) if chunk else ()
        if error is not None:
            raise error
        if len(chunk) < size:
            return
        start += size


def _take(rows: Iterator[Row], count: int) -> tuple[list[Row], UserError | None]:
    """Returns at most `count` rows, and the error raised by the next one, if any."""
    taken: list[Row] = []
    try:
        for row in itertools.islice(rows, count):
            taken.append(row)
    except UserError as error:
        return taken, error
    return taken, None


def longest_first(lengths: Sequence[int], window: int) -> list[int]:
    """Returns the indices of the rows that are not empty, by `window` consecutive rows, longer rows of each first."""
    order = sorted(range(len(lengths)), key=lambda n: (n // window, -lengths[n]))
    return [n for n in order if lengths[n]]


def pad_rows(rows: Sequence[Sequence[int]], count: int, length: int, pad_left: bool = False) -> np.ndarray:
    """Stacks token ids into int32 [count, length]; missing tokens and missing rows are PAD."""
    padded = np.full((count, length), PAD, np.int32)
    for number, row in enumerate(rows):
        start = length - len(row) if pad_left else 0
        padded[number, start : start + len(row)] = row
    return padded


def pad_inputs(rows: Sequence[Mapping[str, Sequence[int]]], count: int, length: int) -> dict[str, np.ndarray]:
    """Stacks the inputs of rows by batch key, as `pad_rows` does; `prefix`, one number per row, has shape [count]."""
    batch = {key: pad_rows([row[key] for row in rows], count, length) for key in rows[0]}
    if "prefix" in batch:
        batch["prefix"] = batch["prefix"][:, 0]
    return batch


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def powers_of_two(first: int, last: int) -> list[int]:
    """Returns the powers of two from `power_of_two(first)` that are below `last`, and then `last` itself."""
    numbers = [power_of_two(first)]
    while numbers[-1] < last:
        numbers.append(2 * numbers[-1])
    return [number for number in numbers if number < last] + [last]
