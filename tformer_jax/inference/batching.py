"""From rows of token ids to batches of few shapes, and the results back in order."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from tformer_jax.config import ConfigError
from tformer_jax.special_tokens import PAD

Item = TypeVar("Item")
Row = TypeVar("Row")
Result = TypeVar("Result")

CHUNK = 1024
"""Rows of any number that are held at once; batches are made of them."""

SHORTEST = 16
"""Batches are at least so many tokens long: shorter ones would compile again to save little."""


def in_batches(
    rows: Sequence[Sequence[int]],
    run: Callable[[np.ndarray, np.ndarray], Iterable[Result]],
    *,
    size: int,
    max_length: int,
    pad_left: bool = False,
) -> list[Result]:
    """Calls `run` on rows of similar length, and puts its results in the order of `rows`.

    Args:
        rows: token ids, none longer than `max_length`; a row may be empty.
        run: takes padded tokens int32 [B, T] and the rows' places in `rows`, int32 [B]; gives one result a row, of
            which those of rows that only fill up the batch are dropped. T is a power of two, or `max_length`.
        size: the largest B. All calls share one B.
        pad_left: put padding before the tokens.
    """
    results: dict[int, Result] = {}
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    size = min(size, power_of_two(len(rows)))
    for start in range(0, len(order), size):
        places = order[start : start + size]
        longest = max(len(rows[places[-1]]), SHORTEST)
        tokens = pad_rows([rows[place] for place in places], size, min(power_of_two(longest), max_length), pad_left)
        found = run(tokens, np.resize(np.array(places, np.int32), size))
        results.update(zip(places, found, strict=False))
    return [results[place] for place in range(len(rows))]


def in_chunks(
    items: Iterable[Item],
    read: Callable[[int, Item], Row],
    run: Callable[[list[Row], int], Sequence[Result]],
    *,
    skip: int = 0,
    size: int = CHUNK,
) -> Iterator[Result]:
    """The results of any number of items, in order; no more than `size` items are held.

    Args:
        read: makes a row of an item's place, from 0, and the item.
        run: takes rows and the place of the first; gives one result a row.
        skip: so many first results are left out; the others are the same, bit for bit, as without it.

    Raises:
        ConfigError: of `items` or `read`, after the results of all items before.
    """
    items = iter(items)
    start = skip - skip % size
    collections.deque(itertools.islice(items, start), maxlen=0)
    rows = map(read, itertools.count(start), items)
    while True:
        chunk, error = _take(rows, size)
        yield from run(chunk, start)[max(skip - start, 0) :] if chunk else ()
        if error is not None:
            raise error
        if len(chunk) < size:
            return
        start += size


def _take(rows: Iterator[Row], count: int) -> tuple[list[Row], ConfigError | None]:
    """At most `count` rows, and what went wrong with the next one."""
    taken: list[Row] = []
    try:
        for row in itertools.islice(rows, count):
            taken.append(row)
    except ConfigError as error:
        return taken, error
    return taken, None


def pad_rows(rows: Sequence[Sequence[int]], count: int, length: int, pad_left: bool = False) -> np.ndarray:
    """Stacks token ids into int32 [count, length]; missing tokens and missing rows are PAD."""
    padded = np.full((count, length), PAD, np.int32)
    for number, row in enumerate(rows):
        start = length - len(row) if pad_left else 0
        padded[number, start : start + len(row)] = row
    return padded


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def powers_of_two(first: int, last: int) -> list[int]:
    """The powers of two from that of `first` on, below `last`, and then `last`; only `last` if it is smaller."""
    numbers = [power_of_two(first)]
    while numbers[-1] < last:
        numbers.append(2 * numbers[-1])
    return [number for number in numbers if number < last] + [last]
