"""Types of examples and corpora."""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from tformer_jax.config import Config, DataConfig
from tformer_jax.data.corpora.example import NO_TEXT, Example
from tformer_jax.data.corpora.example import DataError as DataError

if TYPE_CHECKING:
    from tformer_jax.data.corpora.filters import Filters
    from tformer_jax.data.corpora.lines import BadLines

PAIRS, TEXTS, LABELED, CHATS = ("source", "target"), ("text",), ("text", "label"), ("messages",)
"""Keys of examples."""
FILE_SETTINGS = ("train", "validation", "test", "weights", "weight_by", "stages", "validation_fraction")
"""Settings of sources that read files."""
CHARACTERS = 4_000_000
"""Approximate maximum number of characters to tokenize for a count."""
DIGESTED = 1_000_000
"""Maximum number of examples in memory to read for their digest."""
DIRECTIONS = ("directions", "both_directions", "zero_shot")
"""Settings of sources that have pairs of many languages."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three splits with random access; `labels` are the class names, if any."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    labels: tuple[str, ...] | None = None
    directions: Mapping[str, int] | None = None
    """Number of training examples of each direction, in the order of `train`; None: one direction, or no pairs."""
    tokenizers: Path | None = None
    """Folder of the tokenizers of a prepared corpus."""
    left_out: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """Number of malformed lines and of examples that filters dropped, by split and reason."""
    root: Path | None = None
    """The data folder."""

    @property
    def sizes(self) -> list[int]:
        """Numbers of training examples of the parts that a mixture draws from."""
        if self.directions:
            return list(self.directions.values())
        return self.train.sizes if isinstance(self.train, Joined) else [len(self.train)]


class Endless(Sequence[Example]):
    """A training split that generates its examples on access."""

    def origin(self) -> dict[str, Any]:
        """Returns everything that the examples depend on, ready for JSON; equal origins give equal examples."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Splits:
    """Three splits that can be iterated over repeatedly."""

    train: Iterable[Example]
    validation: Iterable[Example]
    test: Iterable[Example]
    labels: tuple[str, ...] | None = None
    bad: "dict[str, BadLines]" = dataclasses.field(default_factory=dict)
    """Skipped lines of each split read so far; empty for sources that are not files."""
    filters: "dict[str, Filters]" = dataclasses.field(default_factory=dict)
    """Filters of the examples named for each split; empty for sources that are loaded as a whole."""
    known_left_out: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """As `Corpus.left_out`, of sources that are loaded as a whole."""

    @property
    def left_out(self) -> dict[str, dict[str, int]]:
        """As `Corpus.left_out`, of the splits read so far."""
        read = {split: bad.reasons() | self.filters[split].dropped for split, bad in self.bad.items()}
        return {split: dict(counts) for split, counts in {**self.known_left_out, **read}.items()}


class Source:
    """Where a corpus comes from: a value of `data.source`, whose class is in `kinds.CORPORA`.

    Every command that reads a config imports the class: its module imports no JAX.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    """The settings of `data` that depend on the source and that this source uses."""
    examples: ClassVar[tuple[tuple[str, ...], ...] | None] = None
    """Keys of the examples that it may have; None: any, named by `data.fields`."""
    reads_chats: ClassVar[bool] = False
    """Whether its examples may be conversations."""
    multilingual: ClassVar[bool] = False
    """Whether its pairs always have directions."""
    entry: ClassVar[str] = ""
    """An entry of `data.train`, which must name the data, for messages; "": the examples are generated."""

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` if settings of `data` do not fit the source."""

    @classmethod
    def files(cls, cfg: Config, root: Path | None) -> Sequence[Path]:
        """Returns the files that determine the examples beside the settings; raises `DataError` if one is missing."""
        return ()

    @classmethod
    def check_present(cls, cfg: Config, root: Path | None) -> None:
        """Raises `DataError` if data is missing, without reading all of it."""
        cls.files(cfg, root)

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        """Loads the corpus; `root` is the data folder.

        Raises:
            DataError: the data is missing, empty or malformed.
        """
        raise NotImplementedError

    @classmethod
    def stream(cls, cfg: Config, root: Path | None) -> Splits:
        """Opens the corpus for sequential passes."""
        corpus = cls.load(cfg, root)
        return Splits(corpus.train, corpus.validation, corpus.test, corpus.labels, known_left_out=corpus.left_out)


class Indexed(Sequence[T]):
    """A sequence whose slices are lists; a subclass defines its length and `element`."""

    def element(self, index: int) -> T:
        """Returns the element at an index, which counts from the end if it is negative, as in a list."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return list(map(self.element, range(len(self))[index]))
        return self.element(index)


class Joined(Indexed[Any]):
    """Concatenation of sequences without copying them; `sizes` are their lengths."""

    def __init__(self, parts: Sequence[Any]):
        self.parts = parts
        self.sizes = [len(part) for part in parts]
        self._ends = list(itertools.accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def element(self, index: int) -> Any:
        part, offset = self.locate(range(len(self))[index])
        return self.parts[part][offset]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the number of the part that holds element `index`, and the index within that part."""
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part] - self.sizes[part])


def spread(size: int, limit: int = 0) -> Sequence[int]:
    """Returns at most `limit` (0: all) evenly spread indices of `size` elements, in order."""
    count = min(size, limit or size)
    return range(size) if count == size else [number * size // count for number in range(count)]


def evaluated_indices(examples: Sequence[Example], limit: int = 0) -> Sequence[int]:
    """Returns `spread` indices of examples to evaluate; equally many of each direction, unless it has fewer."""
    if not 0 < limit < len(examples) or "direction" not in examples[0]:
        return spread(len(examples), limit)
    places: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        places.setdefault(example["direction"], []).append(index)
    chosen: list[int] = []
    for number, part in enumerate(sorted(places.values(), key=len)):
        share = min(len(part), (limit - len(chosen)) // (len(places) - number))
        chosen += [part[place] for place in spread(len(part), share)] if share else []
    return sorted(chosen)


class Part(Indexed[Any]):
    """View of the elements `indices` of another sequence."""

    def __init__(self, parent: Sequence[Any], indices: Sequence[int]):
        self.parent, self.indices = parent, indices

    def __len__(self) -> int:
        return len(self.indices)

    def element(self, index: int) -> Any:
        return self.parent[self.indices[index]]


def affordable(examples: Sequence[Example], limit: int) -> Sequence[int]:
    """Returns the indices of evenly spread examples to tokenize: at most `limit`, fewer if they are long."""
    probe = spread(len(examples), 50)
    texts = (text for index in probe for key, text in examples[index].items() if key not in NO_TEXT)
    characters = sum(map(len, texts)) / max(len(probe), 1)
    return spread(len(examples), max(1, min(limit, int(CHARACTERS / max(characters, 1)))))


def origin_of(examples: Iterable[Example]) -> Any | None:
    """Returns what determines examples, ready for JSON; None if only a slow reading of all of them would tell."""
    match examples:
        case list() if len(examples) <= DIGESTED:
            return _digest(itertools.chain.from_iterable(example.items() for example in examples))
        case Joined():
            origins = [origin_of(part) for part in examples.parts]
            return None if None in origins else origins
        case Part():
            origin, indices = origin_of(examples.parent), examples.indices
            return origin and [origin, str(indices) if isinstance(indices, range) else _digest(indices)]
    return examples.origin() if hasattr(examples, "origin") else None


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(repr(value).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
