"""The splits of a corpus in files: as streams that hold one line in memory, or loaded as lists."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tformer_jax.config import Config
from tformer_jax.data.corpora import files
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example, Joined
from tformer_jax.data.corpora.lines import BadLines

NAMES = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Splits:
    """Three splits that can be iterated over again and again."""

    train: Iterable[Example]
    validation: Iterable[Example]
    test: Iterable[Example]
    labels: tuple[str, ...] | None = None
    bad: dict[str, BadLines] = dataclasses.field(default_factory=dict)
    """What was skipped in each split that has been read; none for sources without files."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """The examples `start` to `stop` of some entries, read anew in each iteration."""

    read: files.Reader
    names: tuple[str, ...]
    start: int = 0
    stop: int | None = None

    def __iter__(self) -> Iterator[Example]:
        examples = itertools.chain.from_iterable(map(self.read, self.names))
        return itertools.islice(examples, self.start, self.stop)


def stream(cfg: Config, root: Path | None) -> Splits:
    """The splits that `cfg.data` names, read as they are needed.

    Raises:
        DataError: a file is missing, or cannot be read where labels or held-out examples have to be counted.
    """
    data = cfg.data
    skip = data.on_bad_line == "skip"
    bad = {name: BadLines(skip=skip) for name in NAMES if getattr(data, name)}
    found = {name: Stream(files.reader(cfg, root, bad[name]), getattr(data, name)) for name in bad}
    train, validation = (found["train"], found["validation"]) if data.validation else _hold_out(cfg, found["train"])
    splits = Splits(train, validation, found.get("test", validation), bad=bad)
    return dataclasses.replace(splits, labels=_labels(splits)) if cfg.model.family == "classifier" else splits


def load(cfg: Config, root: Path | None) -> Corpus:
    """The same splits, in memory; the entries of a mixture stay apart.

    Raises:
        DataError: a file is missing, empty or malformed, or a split has no example.
    """
    splits = stream(cfg, root)
    train: Iterable[Example] = splits.train
    if cfg.data.weights:
        assert isinstance(train, Stream)
        train = Joined([_loaded(Stream(train.read, (name,)), name) for name in train.names])
    else:
        train = _loaded(train, "train")
    validation = _loaded(splits.validation, "validation")
    test = validation if splits.test is splits.validation else _loaded(splits.test, "test")
    for bad in splits.bad.values():
        bad.report()
    return Corpus(train, validation, test, splits.labels)


def _loaded(examples: Iterable[Example], name: str) -> list[Example]:
    found = list(examples)
    if not found:
        raise DataError(f"the split {name} has no example that can be read")
    return found


def _hold_out(cfg: Config, train: Stream) -> tuple[Iterable[Example], Iterable[Example]]:
    """The first and the last part of the training examples; of a single document, of its characters."""
    if cfg.data.source == "text":
        documents = list(train)
        if len(documents) == 1:
            document = documents[0]["text"]
            boundary = int(len(document) * (1 - cfg.data.validation_fraction))
            return [{"text": document[:boundary]}], [{"text": document[boundary:]}]
    count = sum(1 for _ in train)
    boundary = int(count * (1 - cfg.data.validation_fraction))
    if boundary in (0, count):
        raise DataError(f"{', '.join(cfg.data.train)} is too short to hold out data.validation_fraction of it")
    return dataclasses.replace(train, stop=boundary), dataclasses.replace(train, start=boundary)


def _labels(splits: Splits) -> tuple[str, ...]:
    labels = tuple(sorted({example["label"] for example in splits.train}))
    for split in (splits.validation, splits.test):
        unknown = {example["label"] for example in split} - set(labels)
        if unknown:
            raise DataError(
                f"label {min(unknown)!r} of the held-out data does not occur in the training data, "
                f"which has {', '.join(labels)}"
            )
    return labels
