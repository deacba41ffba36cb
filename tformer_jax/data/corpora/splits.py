"""Splits of a corpus in files, streamed line by line or loaded into memory."""

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from tformer_jax.config import Config, DataConfig
from tformer_jax.config.directions import Direction
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example, Joined, Splits
from tformer_jax.data.corpora.directions import DirectionFilter, fill, group_by_direction
from tformer_jax.data.corpora.filters import Filters
from tformer_jax.data.corpora.lines import BadLines
from tformer_jax.data.corpora.locations import locate

NAMES = ("train", "validation", "test")
SKIP = "data.on_bad_line='skip'"
ENOUGH = 20
"""Held-out examples that do not have the same label by chance."""
MANY_LABELS = 20
"""If a corpus has more labels than this, and most examples have one of their own, the labels are probably texts."""


class Reader(Protocol):
    """Reads the entries of one split."""

    @property
    def bad(self) -> BadLines:
        """Malformed lines of the files."""
        ...

    def read_entry(self, name: str) -> Iterator[Example]:
        """Yields the examples of the files that `name` names."""
        ...


@dataclasses.dataclass(frozen=True)
class Stream:
    """Examples `start` to `stop` (exclusive) of some entries, read from their files in each iteration."""

    reader: Reader
    filters: Filters
    names: tuple[str, ...]
    by_direction: DirectionFilter
    start: int = 0
    stop: int | None = None

    def __iter__(self) -> Iterator[Example]:
        examples = self.filters(itertools.chain.from_iterable(map(self.reader.read_entry, self.names)))
        return itertools.islice(self.by_direction(examples), self.start, self.stop)


def stream(source: Callable[..., Reader], cfg: Config, root: Path | None) -> Splits:
    """Opens the splits that `cfg.data` names as streams.

    Raises:
        DataError: a file is missing; or it is malformed and has to be read for its labels or its size.
    """
    data = cfg.data
    skip = data.on_bad_line == "skip"
    bad = {name: BadLines(skip=skip, setting=SKIP) for name in NAMES if getattr(data, name)}
    filters = {name: Filters(data.filters, training=name == "train") for name in bad}
    streams = {}
    for name in bad:
        dropped = filters[name].dropped
        reader = source(data, root, task_of(cfg).keys, bad[name], dropped, read_directions(data, name))
        by_direction = DirectionFilter(data, training=name == "train", dropped=dropped)
        streams[name] = Stream(reader, filters[name], getattr(data, name), by_direction)
    _report_shared_files(data, root)
    train = streams["train"]
    train_split, validation = (train, streams["validation"]) if data.validation else _hold_out(cfg, train)
    splits = Splits(train_split, validation, streams.get("test", validation), bad=bad, filters=filters)
    if "label" not in task_of(cfg).keys:
        return splits
    labels = _labels(splits, named=bool(data.fields))
    if not data.validation and len(labels) > 1:
        check_not_sorted(splits.validation)
    return dataclasses.replace(splits, labels=labels)


def read_directions(data: DataConfig, split: str) -> tuple[Direction, ...]:
    """Returns the directions for which each entry of a split is read; one if the entries do not name languages."""
    if not data.directions or data.language_fields:
        return (Direction(data.source_language, data.target_language),)
    zero_shot = () if split == "train" else data.zero_shot
    return tuple(map(Direction.parse, (*data.directions, *zero_shot)))


def load(source: Callable[..., Reader], cfg: Config, root: Path | None) -> Corpus:
    """Loads the splits that `cfg.data` names into memory; the entries of a mixture are kept as parts.

    Raises:
        DataError: a file is missing, empty or malformed, or a split has no example.
    """
    splits = stream(source, cfg, root)
    train: Iterable[Example] = splits.train
    directions = None
    if cfg.data.multilingual:
        train, directions = group_by_direction(cfg.data, train)
    elif cfg.data.mixed:
        assert isinstance(train, Stream)
        train = _load_parts(train)
    else:
        train = _load_split(train, "train")
    validation = _load_split(splits.validation, "validation")
    test = validation if splits.test is splits.validation else _load_split(splits.test, "test")
    for bad in splits.bad.values():
        bad.report()
    return Corpus(train, validation, test, splits.labels, directions, left_out=splits.left_out)


def _load_parts(train: Stream) -> Joined:
    """Loads each entry of a mixture; the filters count what they drop of all."""
    parts, dropped = [], collections.Counter[str]()
    for name in train.names:
        parts.append(_load_split(dataclasses.replace(train, names=(name,)), name))
        dropped += train.filters.dropped
    train.filters.dropped.update(dropped - train.filters.dropped)
    return Joined(parts)


def _report_shared_files(data: DataConfig, root: Path | None) -> None:
    """Warns if a file is read for training and for another split, as a glob may do unintentionally."""

    def paths(split: str) -> set[Path]:
        entries = itertools.product(getattr(data, split), read_directions(data, split))
        names = (fill(name, direction, direction.source) for name, direction in entries)
        return {path.resolve() for name in names for path in locate(root, name)}

    train = paths("train")
    for split in ("validation", "test"):
        for path in sorted(train & paths(split)):
            logging.getLogger(__name__).warning(
                "%s is read for data.train and data.%s: metrics of the %s split are those of training examples",
                path,
                split,
                split,
            )


def _load_split(examples: Iterable[Example], name: str) -> list[Example]:
    loaded = list(examples)
    if not loaded:
        raise no_example(name, examples)
    return loaded


def no_example(split: str, examples: Iterable[Example]) -> DataError:
    """Returns the error for a split that has been read and has no example, with the reason if lines were skipped."""
    if not isinstance(examples, Stream):
        return DataError(f"split {split} has no valid example")
    explanation = f"{examples.reader.bad.explanation()}{examples.filters.explanation()}"
    return DataError(f"split {split} has no valid example{explanation}")


def _hold_out(cfg: Config, train: Stream) -> tuple[Iterable[Example], Iterable[Example]]:
    """Splits the training examples in two; a single document is split by characters."""
    if cfg.data.source == "text":
        documents = list(train)
        if len(documents) == 1:
            document = documents[0]["text"]
            boundary = hold_out_from(cfg, len(document), train.reader.bad)
            return [{"text": document[:boundary]}], [{"text": document[boundary:]}]
    boundary = hold_out_from(cfg, sum(1 for _ in train), train.reader.bad)
    return dataclasses.replace(train, stop=boundary), dataclasses.replace(train, start=boundary)


def hold_out_from(cfg: Config, count: int, bad: BadLines | None = None) -> int:
    """Returns the index of the first of `count` training examples, or characters, that is held out for validation.

    Args:
        bad: skipped lines of the training split, for the message.

    Raises:
        DataError: one of the two parts would be empty.
    """
    boundary = int(count * (1 - Fraction(str(cfg.data.validation_fraction))))
    if boundary in (0, count):
        raise DataError(
            f"{', '.join(cfg.data.train)} is too short to hold out data.validation_fraction="
            f"{cfg.data.validation_fraction} of it: name validation data in data.validation"
            f"{bad.explanation() if bad else ''}"
        )
    return boundary


def _labels(splits: Splits, *, named: bool) -> tuple[str, ...]:
    """Returns the labels of the training split; unless the fields are `named`, they must not look like texts."""
    counts = collections.Counter(example["label"] for example in splits.train)
    labels = tuple(sorted(counts))
    if not named and len(labels) > max(MANY_LABELS, counts.total() / 2):
        raise DataError(
            f"data.train has {len(labels):,} labels in {counts.total():,} examples: name the fields of text and label "
            "in data.fields, such as ('1', '2')"
        )
    if len(labels) == 1:
        raise DataError(f"data.train has only the label {labels[0]!r}: a classifier needs at least two")
    if once := [label for label in labels if counts[label] == 1]:
        logging.getLogger(__name__).warning(
            "label %r has only one example in data.train; TSV files have no header line", min(once)
        )
    for split in (splits.validation, splits.test):
        unknown = {example["label"] for example in split} - set(labels)
        if unknown:
            raise DataError(
                f"label {min(unknown)!r} of the held-out data does not occur in the training data, which has "
                f"{', '.join(labels)}: add such examples to data.train, or remove them from the held-out data"
            )
    return labels


def check_not_sorted(held_out: Iterable[Example]) -> None:
    """Raises `DataError` if all of at least `ENOUGH` held-out examples have the same label."""
    found: collections.Counter[str] = collections.Counter()
    for example in held_out:
        found[example["label"]] += 1
        if len(found) > 1:
            return
    if found.total() >= ENOUGH:
        raise DataError(
            f"the last {found.total():,} examples of data.train, held out for validation, all have the label "
            f"{next(iter(found))!r}: shuffle the examples, or name validation data in data.validation"
        )
