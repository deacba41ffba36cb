"""The order of examples in training: endless, seeded, reshuffled in each epoch, mixed by weights."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np
from grain.experimental import index_shuffle

DRAWS = 2**20
"""Sum of the weights of a mixture, which are rounded to whole numbers if they do not change."""
SMALL = 1024
"""Number of examples below which a permutation of them is kept in memory."""


@functools.lru_cache(maxsize=64)
def shuffle_seed(seed: int, source: int, epoch: int) -> int:
    """Returns the uint32 seed of one epoch of one source: a BLAKE2b hash, so that each has an order of its own."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {source} {epoch}".encode(), digest_size=4).digest())


def _shuffled_index(index: int, size: int, seed: int) -> int:
    """Returns the element `index` of a permutation of `size` elements.

    `index_shuffle` needs no memory, but 9 ms for one of 2 elements (3 us for one of 29,000).
    """
    return int(_permutation(size, seed)[index]) if size < SMALL else index_shuffle(index, size - 1, seed, 4)


@functools.lru_cache(maxsize=64)
def _permutation(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


class Order(Protocol):
    """An endless order of examples."""

    def number_block(self, size: int, number: int) -> np.ndarray:
        """Returns the numbers `epoch * total + index` of block `number` of `size` examples: int64 [size]."""


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """The indices from `start` to `start + size`, repeated endlessly and reshuffled in each epoch.

    Each is returned as the number `epoch * total + index`.
    """

    start: int
    size: int
    total: int
    seed: int
    source: int = 0

    def __call__(self, position: int) -> int:
        epoch, inside = divmod(int(position), self.size)
        shuffled = _shuffled_index(inside, self.size, shuffle_seed(self.seed, self.source, epoch))
        return epoch * self.total + self.start + shuffled

    def number_block(self, size: int, number: int) -> np.ndarray:
        """Returns the numbers of block `number` of `size` examples: int64 [size]."""
        return np.fromiter(map(self, range(number * size, (number + 1) * size)), np.int64, size)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Draws from sources by weights: after any number of draws, each source has its share, up to about one draw.

    Draw i of a source, counted from 0, is due when the source's share of all draws reaches i + 1/2. Draws are made in
    the order in which they are due; if several are due at once, earlier sources come first.
    """

    begin: tuple[float, ...]
    """Weights at the first draw, with the sum of `end`."""
    end: tuple[float, ...]
    length: float = np.inf
    """Number of draws in which weights change linearly from `begin` to `end`; they then stay."""

    @classmethod
    def constant(cls, weights: Sequence[float]) -> "Mixture":
        """Returns a mixture by weights exact to 1 / `DRAWS`; a source of weight 0 is not drawn."""
        counts = tuple(float(share and max(round(share), 1)) for share in _scaled(weights))
        return cls(counts, counts)

    @classmethod
    def linear(cls, begin: Sequence[float], end: Sequence[float], length: float) -> "Mixture":
        """Returns a mixture whose shares change linearly in the first `length` draws."""
        return cls(tuple(_scaled(begin)), tuple(_scaled(end)), length)

    def draws(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each draw from `start` to `stop`, and its number there: int64 [draws] each."""
        source, earlier, first = self._around(start, stop)
        inside = slice(start - first.sum(), stop - first.sum())
        return source[inside], earlier[inside]

    def counts(self, draws: int) -> np.ndarray:
        """Returns the number of the first `draws` draws that are of each source: int64 [sources]."""
        source, _, first = self._around(draws, draws)
        return first + np.bincount(source[: draws - first.sum()], minlength=len(first))

    def draws_until(self, source: int, count: int) -> int:
        """Returns the number of draws after which `source` has been drawn `count` times, at least once."""
        near = int(self._due(np.array([source]), np.array([count - 1]))[0])
        sources, earlier, first = self._around(near, near)
        (place,) = np.flatnonzero((sources == source) & (earlier == count - 1))
        return int(first.sum() + place) + 1

    def _around(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns sources and earlier draws of all draws from `start` to `stop` and some beside, in order.

        Also the number of draws of each source before these: int64 [sources].
        """
        margin = 2 * len(self.begin) + 2
        first = np.maximum(np.ceil(self._shares(max(start - margin, 0)) - 0.5), 0).astype(np.int64)
        last = np.ceil(self._shares(stop + margin)).astype(np.int64)
        source = np.repeat(np.arange(len(first)), last - first)
        earlier = np.concatenate(list(map(np.arange, first, last)))
        order = np.argsort(self._due(source, earlier), kind="stable")
        return source[order], earlier[order], first

    def _shares(self, draws: float) -> np.ndarray:
        """Returns the share of each source in the first `draws` draws, in draws: float64 [sources]."""
        begin, end = np.array(self.begin), np.array(self.end)
        changing = min(draws, self.length)
        change = (end - begin) * (changing * (changing / self.length)) / 2
        return (begin * changing + change + end * (draws - changing)) / begin.sum()

    def _due(self, source: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        """Returns the number of draws, a fraction, at which draw `earlier` of `source` is due: float64 [draws]."""
        begin, end, total = np.array(self.begin), np.array(self.end), np.sum(self.begin)
        wanted, slope = (earlier + 0.5) * total, ((end - begin) / self.length)[source]
        with np.errstate(divide="ignore", invalid="ignore"):
            root = np.sqrt(np.maximum(begin[source] ** 2 + 2 * slope * wanted, 0))
            due = 2 * wanted / (begin[source] + root)
            if np.isfinite(self.length):
                beyond = wanted - ((begin + end) * self.length / 2)[source]
                due = np.where(beyond > 0, self.length + beyond / end[source], due)
        return due


def _scaled(weights: Sequence[float]) -> list[float]:
    return (np.array(weights, float) / np.sum(weights) * DRAWS).tolist()


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """The indices of sources, mixed."""

    sources: tuple[Shuffled, ...]
    mixture: Mixture

    def number_block(self, size: int, number: int) -> np.ndarray:
        """Returns the numbers of block `number` of `size` examples: int64 [size]."""
        return shuffled_numbers(self.sources, *self.mixture.draws(number * size, (number + 1) * size))


def shuffled_numbers(sources: Sequence[Shuffled], chosen: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the number of each draw, given its source and position there: int64 [draws]."""
    pairs = zip(chosen.tolist(), positions.tolist(), strict=True)
    return np.fromiter((sources[source](position) for source, position in pairs), np.int64, len(chosen))


def shuffled_sources(sizes: Sequence[int], seed: int) -> tuple[Shuffled, ...]:
    """Returns the order of each of several sources."""
    ends, total = itertools.accumulate(sizes), sum(sizes)
    parts = enumerate(zip(sizes, ends, strict=True))
    return tuple(Shuffled(end - size, size, total, seed, number) for number, (size, end) in parts)


def index_blocks(
    sizes: Sequence[int], weights: Sequence[float], seed: int, block_size: int, stages: Order | None = None
) -> grain.MapDataset:
    """Returns endless blocks of `block_size` example indices, reshuffled each epoch and mixed by `weights`, if any.

    Given `stages`, the order is theirs.
    """
    numbered = numbered_blocks(sizes, weights, seed, block_size, stages)
    return numbered.map(functools.partial(_strip_epochs, sum(sizes)))


def _strip_epochs(total: int, numbers: np.ndarray) -> np.ndarray:
    return numbers % total


def numbered_blocks(
    sizes: Sequence[int], weights: Sequence[float], seed: int, block_size: int, stages: Order | None = None
) -> grain.MapDataset:
    """Returns `index_blocks` with numbers `epoch * sum(sizes) + index` in place of the indices."""
    order: Order = Shuffled(0, sum(sizes), sum(sizes), seed)
    if stages is not None:
        order = stages
    elif weights:
        order = _Mixed(shuffled_sources(sizes, seed), Mixture.constant(weights))
    return grain.MapDataset.range(2**48).map(functools.partial(order.number_block, block_size))
