"""Splits of a corpus in files, streamed line by line or loaded into memory."""

import collections
import dataclasses
import functools
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tformer_jax.base import user_cache
from tformer_jax.base.errors import list_names
from tformer_jax.config import Config, DataConfig, kinds
from tformer_jax.config.directions import Direction
from tformer_jax.config.task import task_of
from tformer_jax.data import characters
from tformer_jax.data.corpora.corpus import FILE_SETTINGS, Corpus, DataError, Example, Joined, Part, Splits
from tformer_jax.data.corpora.directions import DirectionFilter, check_held_out, fill, group_by_direction
from tformer_jax.data.corpora.filters import Filters
from tformer_jax.data.corpora.lines import BadLines
from tformer_jax.data.corpora.locations import locate

if TYPE_CHECKING:
    from tformer_jax.data.corpora.blocks import Block

NAMES = ("train", "validation", "test")
SKIP = "data.on_bad_line='skip'"
ENOUGH = 20
"""Held-out examples that do not have the same label by chance."""
READING = ("source", "source_language", "target_language", "fields", "language_fields", "header", "clean_whitespace")
"""Settings that change what is read, of any source."""
MANY_LABELS = 20
"""If a corpus has more labels than this, and most examples have one of their own, the labels are probably texts.

Messages name as many labels."""


class Reader(Protocol):
    """Reads the entries of one split."""

    @property
    def bad(self) -> BadLines:
        """Malformed lines of the files."""

    def read_entry(self, name: str) -> Iterator[Example]:
        """Yields the examples of the files that `name` names."""

    def read_blocks(self, name: str) -> Iterator["Block"]:
        """Yields the same examples in blocks."""


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

    def blocks(self) -> Iterator["Block"]:
        """Yields all examples in blocks, as they are read if no more than blank texts is dropped."""
        if not self.filters.only_blank or self.filters.data.multilingual:
            yield self
            return
        self.filters.dropped.clear()
        for block in itertools.chain.from_iterable(map(self.reader.read_blocks, self.names)):
            yield self.filters.select(block) if isinstance(block, Iterable) else block  # columns are no iterable

    def facts(self) -> dict[str, Any]:
        """Returns what the last pass has counted, ready for JSON."""
        others = sorted(map(str, self.by_direction.others))
        return {"dropped": self.filters.dropped, "others": others, "malformed": self.reader.bad.facts()}

    def restore(self, facts: dict[str, Any]) -> None:
        """Takes the counts of an earlier pass."""
        self.filters.dropped.clear()
        self.filters.dropped.update(facts["dropped"])
        self.by_direction.others.update(map(Direction.parse, facts["others"]))
        self.reader.bad.restore(facts["malformed"])


def open_streams(source: type[Any], cfg: Config, root: Path | None) -> dict[str, Stream]:
    """Opens the splits that `cfg.data` names, which are read in each pass; warns about files of several splits.

    Raises:
        DataError: a file is missing.
    """
    data = cfg.data
    skip = data.on_bad_line == "skip"
    bad = {name: BadLines(skip=skip, setting=SKIP) for name in NAMES if getattr(data, name)}
    streams = {}
    for name in bad:
        drops = Filters(data, training=name == "train", once=not data.multilingual)
        dropped = drops.dropped
        reader = source(data, root, task_of(cfg).keys, bad[name], dropped, read_directions(data, name))
        by_direction = DirectionFilter(data, training=name == "train", dropped=dropped)
        streams[name] = Stream(reader, drops, getattr(data, name), by_direction)
    _report_shared_files(data, root)
    return streams


def stream(source: type[Any], cfg: Config, root: Path | None) -> Splits:
    """Opens the splits as streams, which are read in each pass.

    Raises:
        DataError: a file is missing; or it is malformed and has to be read for its labels or its size.
    """
    streams = open_streams(source, cfg, root)
    train, validation, test, labels = divide(cfg, streams, streams["train"].reader.bad)
    bad = {name: each.reader.bad for name, each in streams.items()}
    return Splits(train, validation, test, labels, bad, {name: each.filters for name, each in streams.items()})


def divide(
    cfg: Config, read: Mapping[str, Any], bad: BadLines, labels: tuple[str, ...] | None = None
) -> tuple[Any, Any, Any, tuple[str, ...] | None]:
    """Returns three splits of the examples `read` by setting, and a classifier's labels; `bad` is for messages."""
    train, validation = (
        (read["train"], read["validation"]) if cfg.data.validation else _hold_out(cfg, read["train"], bad)
    )
    test = read.get("test", validation)
    if "label" not in task_of(cfg).keys:
        return train, validation, test, None
    labels = labels or _collect_labels(cfg.data, train, (validation, test))
    if not cfg.data.validation and len(labels) > 1:
        _check_not_sorted(validation)
    return train, validation, test, labels


def read_directions(data: DataConfig, split: str) -> tuple[Direction, ...]:
    """Returns the directions for which each entry of a split is read; one if the entries do not name languages.

    With `data.both_directions`, the pairs of each are also those of its reverse, which is not read.
    """
    if not data.directions or data.language_fields:
        return (Direction(data.source_language, data.target_language),)
    read: list[Direction] = []
    for direction in map(Direction.parse, (*data.directions, *(() if split == "train" else data.zero_shot))):
        if not (data.both_directions and direction.reverse in read):
            read.append(direction)
    return tuple(read)


def load(source: type[Any], cfg: Config, root: Path | None) -> Corpus:
    """Loads the splits that `cfg.data` names into memory; the entries of a mixture are kept as parts.

    Raises:
        DataError: a file is missing, empty or malformed, or a split has no example.
    """
    streams = open_streams(source, cfg, root)
    load_split = functools.partial(_load_split, source, cfg, root)
    read: dict[str, Sequence[Example]] = {}
    for name, each in streams.items():
        in_parts = name == "train" and cfg.data.mixed and not cfg.data.multilingual
        read[name] = _load_parts(load_split, each) if in_parts else load_split(each, name)
    train, validation, test, labels = divide(cfg, read, streams["train"].reader.bad)
    sizes = None
    if cfg.data.multilingual:
        train, sizes = group_by_direction(cfg.data, train, streams["train"].by_direction.others)
        for name, examples in (("data.validation", validation), ("data.test", test)):
            check_held_out(cfg.data, sizes, name, examples)
    for name, examples in zip(NAMES, (train, validation, test), strict=True):
        if not examples:
            raise no_example(name, streams.get(name, streams["train"]))
    for each in streams.values():
        each.reader.bad.report()
    left_out = {name: each.reader.bad.reasons() | each.filters.dropped for name, each in streams.items()}
    return Corpus(train, validation, test, labels, sizes, left_out=left_out)


def _load_parts(load_split: Callable[[Stream, str], Sequence[Example]], train: Stream) -> Joined:
    """Loads each entry of a mixture; the filters count what they drop of all."""
    parts, dropped = [], collections.Counter[str]()
    for name in train.names:
        part = dataclasses.replace(train, names=(name,))
        parts.append(load_split(part, name))
        if not parts[-1]:
            raise no_example(name, part)
        dropped += train.filters.dropped
    train.filters.dropped.update(dropped - train.filters.dropped)
    return Joined(parts)


def _report_shared_files(data: DataConfig, root: Path | None) -> None:
    """Warns if a file is read for training and for another split, as a glob may do unintentionally."""

    def paths(split: str) -> set[Path]:
        return {path.resolve() for path in files_of(data, root, getattr(data, split), split)}

    train = paths("train")
    for split in ("validation", "test"):
        for path in sorted(train & paths(split)):
            logging.getLogger(__name__).warning(
                "%s is read for data.train and data.%s: metrics of the %s split are of training examples",
                path,
                split,
                split,
            )


def files_of(data: DataConfig, root: Path | None, names: Iterable[str], split: str) -> list[Path]:
    """Returns the files of some entries of a split, in both languages, and their links."""
    entries = itertools.product(names, read_directions(data, split))
    links = [data.links] if data.links is not None and split == "train" else []
    filled = dict.fromkeys(fill(name, direction, side) for name, direction in entries for side in [*direction, *links])
    return list(dict.fromkeys(path for name in filled for path in locate(root, name)))


def _load_split(source: type[Any], cfg: Config, root: Path | None, examples: Stream, name: str) -> Sequence[Example]:
    """Reads the examples of a split, or of the entry `name` of it."""
    from tformer_jax.data import chat
    from tformer_jax.data.corpora.stored import hold  # loads pyarrow

    training = examples.filters.training
    settings = {*READING, *source.settings} - {*FILE_SETTINGS}

    def key() -> list[Any]:
        if kinds.is_outside(kinds.CORPORA, cfg.data.source):
            raise TypeError("code of other modules, which its own may call, cannot be known")
        code = user_cache.source_digest(sys.modules[__package__], chat, characters)
        values = {setting: str(getattr(cfg.data, setting)) for setting in settings}
        return [code, values, examples.names, task_of(cfg).keys, training]

    files = files_of(cfg.data, root, examples.names, "train" if training else name)
    return hold(examples, examples.blocks, files, key, examples.facts, examples.restore)


def no_example(split: str, examples: Iterable[Example]) -> DataError:
    """Returns the error for a split that has been read and has no example, with the reason if lines were skipped."""
    if not isinstance(examples, Stream):
        return DataError(f"split {split} has no valid example")
    explanation = f"{examples.reader.bad.explanation()}{examples.filters.explanation()}"
    return DataError(f"split {split} has no valid example{explanation}")


def _hold_out(cfg: Config, train: Any, bad: BadLines) -> tuple[Any, Any]:
    """Splits the training examples in two; a single document is split by characters."""
    if cfg.data.source == "text":
        documents = list(train)
        if len(documents) == 1:
            document = documents[0]["text"]
            boundary = _hold_out_from(cfg, len(document), bad)
            return [{"text": document[:boundary]}], [{"text": document[boundary:]}]
    boundary = _hold_out_from(cfg, len(train) if isinstance(train, Sequence) else sum(1 for _ in train), bad)
    if isinstance(train, Stream):
        return dataclasses.replace(train, stop=boundary), dataclasses.replace(train, start=boundary)
    if isinstance(train, list):
        return train[:boundary], train[boundary:]
    return Part(train, range(boundary)), Part(train, range(boundary, len(train)))


def _hold_out_from(cfg: Config, count: int, bad: BadLines) -> int:
    """Returns the index of the first of `count` training examples, or characters, that is held out for validation.

    Raises:
        DataError: one of the two parts would be empty; the message ends with the skipped lines.
    """
    boundary = int(count * (1 - Fraction(str(cfg.data.validation_fraction))))
    if boundary in (0, count):
        raise DataError(
            f"{', '.join(cfg.data.train)} is too short to hold out data.validation_fraction="
            f"{cfg.data.validation_fraction} of it: name validation data in data.validation"
            f"{bad.explanation()}"
        )
    return boundary


def _collect_labels(data: DataConfig, train: Iterable[Example], others: Iterable[Iterable[Example]]) -> tuple[str, ...]:
    """Returns the labels of the training split; unless `data.fields` are named, they must not look like texts."""
    counts = collections.Counter(example["label"] for example in train)
    labels = tuple(sorted(counts))
    if not data.fields and len(labels) > max(MANY_LABELS, counts.total() / 2):
        raise DataError(
            f"data.train has {len(labels):,} labels in {counts.total():,} examples, such as {labels[0][:40]!r}: say in "
            "data.fields which fields are text and label, in this order"
        )
    if len(labels) == 1:
        raise DataError(f"data.train has only the label {labels[0]!r}: a classifier needs at least two")
    hint = "; if it names a column, set data.header=True" if data.source == "tsv" and not data.header else ""
    if once := [label for label in labels if counts[label] == 1]:
        what = f"label {once[0]!r} has" if len(once) == 1 else f"{len(once):,} labels, such as {once[0]!r}, have"
        logging.getLogger(__name__).warning("%s only one example in data.train%s", what, hint)
    for split in others:
        unknown = {example["label"] for example in split} - set(labels)
        if unknown:
            raise DataError(
                f"label {min(unknown)!r} of the held-out data does not occur in the training data, which has "
                f"{list_names(labels, MANY_LABELS)}: add such examples to data.train, or remove them from the held-out "
                "data"
            )
    return labels


def _check_not_sorted(held_out: Iterable[Example]) -> None:
    """Raises `DataError` if all of at least `ENOUGH` held-out examples have the same label."""
    counts: collections.Counter[str] = collections.Counter()
    for example in held_out:
        counts[example["label"]] += 1
        if len(counts) > 1:
            return
    if counts.total() >= ENOUGH:
        raise DataError(
            f"the last {counts.total():,} examples of data.train, held out for validation, all have the label "
            f"{next(iter(counts))!r}: shuffle the examples, or name validation data in data.validation"
        )
