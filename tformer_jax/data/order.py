"""The order of examples in training: endless, seeded, reshuffled in each epoch, mixed by weights."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence

import grain
import numpy as np
from grain.experimental import index_shuffle

DRAWS = 2**20
"""Approximate number of draws from a mixture until its order of sources repeats."""
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


@dataclasses.dataclass(frozen=True)
class _Shuffled:
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
class _Mixed:
    """Sources mixed by weights: after any number of draws, each has its share of them, up to about one draw."""

    sources: tuple[_Shuffled, ...]
    weights: tuple[float, ...]

    def number_block(self, size: int, number: int) -> np.ndarray:
        """Returns the numbers of block `number` of `size` examples: int64 [size]."""
        chosen, earlier, counts = _draws(self.weights)
        cycles, places = np.divmod(np.arange(number * size, (number + 1) * size), len(chosen))
        positions = cycles * counts[chosen[places]] + earlier[places]
        pairs = zip(chosen[places].tolist(), positions.tolist(), strict=True)
        return np.fromiter((self.sources[source](position) for source, position in pairs), np.int64, size)


@functools.lru_cache(maxsize=4)
def _draws(weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a cycle of draws: the source of each, and the number of earlier draws of it; int64 [draws] each.

    Also the number of draws of each source in a cycle: int64 [sources].

    Draw i of a source that is drawn n times stands at (i + 1/2) / n of the cycle.
    """
    shares = np.array(weights, float) / np.sum(weights)
    counts = np.maximum(np.round(shares * DRAWS).astype(np.int64), 1)
    source = np.repeat(np.arange(len(weights)), counts)
    earlier = np.concatenate([np.arange(count) for count in counts.tolist()])
    order = np.argsort((earlier + 0.5) / counts[source], kind="stable")
    return source[order], earlier[order], counts


def index_blocks(sizes: Sequence[int], weights: Sequence[float], seed: int, block_size: int) -> grain.MapDataset:
    """Returns endless blocks of `block_size` example indices, reshuffled each epoch and mixed by `weights`, if any."""
    return numbered_blocks(sizes, weights, seed, block_size).map(functools.partial(_strip_epochs, sum(sizes)))


def _strip_epochs(total: int, numbers: np.ndarray) -> np.ndarray:
    return numbers % total


def numbered_blocks(sizes: Sequence[int], weights: Sequence[float], seed: int, block_size: int) -> grain.MapDataset:
    """Returns `index_blocks` with numbers `epoch * sum(sizes) + index` in place of the indices."""
    ends = list(itertools.accumulate(sizes))
    total = ends[-1]
    endless = grain.MapDataset.range(2**48)
    if not weights:
        return endless.map(functools.partial(_Shuffled(0, total, total, seed).number_block, block_size))
    parts = tuple(
        _Shuffled(end - size, size, total, seed, number)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )
    return endless.map(functools.partial(_Mixed(parts, tuple(weights)).number_block, block_size))
