"""Loads TFDS datasets from array_record files, without TensorFlow."""

import collections
import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from google.protobuf.json_format import ParseError
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from tformer_jax.base import user_cache
from tformer_jax.base.errors import first_line, one_line
from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.config.task import task_of
from tformer_jax.data import characters
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.data.corpora import filters as filtering
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example, Joined, Part
from tformer_jax.data.corpora.directions import DirectionFilter, check_held_out, group_by_direction
from tformer_jax.data.corpora.filters import Filters
from tformer_jax.data.corpora.lines import NOT_UTF8, BadLines
from tformer_jax.data.corpora.records import field_names, is_integer, read_field, with_direction
from tformer_jax.data.corpora.splits import NAMES, divide, read_directions

TFDS_FAMILIES = ("tensorflow_datasets.text", "tensorflow_datasets.translate")
"""Modules that register their datasets on import."""
BUILDERS = ("multi30k", "tatoeba_en_zh", "rt_polarity", "enwik8", "debian_descriptions")
"""Datasets missing from TFDS: modules of `tformer_jax.data.builders`."""
BLOCK = 1024
"""Number of records to read at once, which is four times as fast as one by one."""


class TfdsRecords(Sequence[Example]):
    """The records of a split as examples of text."""

    def __init__(self, source: Any, fields: dict[str, str], labels: tuple[str, ...] | None):
        self._source, self.fields, self._labels = source, fields, labels

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Example]:
        for start in range(0, len(self), BLOCK):
            yield from self[start : start + BLOCK]

    def __getitem__(self, index):
        if isinstance(index, slice):
            indices = range(len(self))[index]
            with _named_damage():
                records = self._source.__getitems__(list(indices))
            return list(map(self._example, indices, records))
        with _named_damage():
            record = self._source[index]
        return self._example(index, record)

    def _example(self, index: int, record: dict[str, Any]) -> Example:
        try:
            values = {key: read_field(record, field) for key, field in self.fields.items()}
            return with_direction({key: self._text(key, value) for key, value in values.items()})
        except UnicodeDecodeError:
            raise DataError(f"example {index} is {NOT_UTF8}") from None

    def _text(self, key: str, value: Any) -> str:
        if key == "label" and self._labels is not None:
            if int(value) < 0:
                raise DataError(
                    "a split has examples without a label (-1): name splits with labels in data.train, data.test, ..."
                )
            return self._labels[int(value)]
        value = value.item() if isinstance(value, np.ndarray) and not value.ndim else value
        if key == "label" and is_integer(value):
            return str(value)
        if not isinstance(value, bytes | str):
            raise DataError(f"field {self.fields[key]!r} is {type(value).__name__}, not text: set data.fields")
        return value.decode() if isinstance(value, bytes) else value


@contextlib.contextmanager
def _named_damage() -> Iterator[None]:
    """Raises `DataError` for files that array_record cannot read."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = first_line(error, 200)
        raise DataError(f"a file of the dataset is damaged ({reason}): build the dataset again") from error


def load(cfg: Config, root: Path | None) -> Corpus:
    """Loads the dataset `cfg.data.dataset` from the data folder `root` (None: TFDS's default folder).

    Raises:
        DataError: the dataset is unknown to TFDS or not prepared, or lacks a split, field or label; or a split, or the
            held-out part of the training split, is empty after the filters, or that has examples of one label only.
    """
    data, builder = cfg.data, find(cfg, root)
    if data.multilingual:
        return _load_directions(cfg, builder)
    (direction,) = read_directions(data, "train")
    fields = _fields(cfg, builder, direction)
    labels = _labels(builder, fields)
    left_out: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def read(split: str, names: tuple[str, ...]) -> Sequence[Example]:
        filters = Filters(data, training=split == "train")
        chosen = _filter(builder, names, _split(builder, names, fields, labels), filters)
        left_out[split] += filters.dropped
        if not chosen:
            raise DataError(f"split {split} has no valid example{filters.explanation()}")
        return chosen

    parts = [read("train", names) for names in (((name,) for name in data.train) if data.mixed else [data.train])]
    others = {split: read(split, getattr(data, split)) for split in NAMES[1:] if getattr(data, split)}
    splits = {"train": Joined(parts) if data.mixed else parts[0], **others}
    return Corpus(*divide(cfg, splits, BadLines(), labels), left_out=left_out)


def check_present(cfg: Config, root: Path | None) -> None:
    """Opens the dataset without reading it; raises `DataError` as `load` does."""
    builder = find(cfg, root)
    for split in NAMES:
        for direction in read_directions(cfg.data, split) if getattr(cfg.data, split) else ():
            fields = _fields(cfg, builder, direction)
            _split(builder, getattr(cfg.data, split), fields, _labels(builder, fields))


def files(cfg: Config, root: Path | None) -> list[Path]:
    """Returns the files of the splits that `cfg` names and of their description; raises `DataError` as `load` does."""
    check_present(cfg, root)
    builder = find(cfg, root)
    names = [name for split in NAMES for name in getattr(cfg.data, split)]
    return [Path(builder.data_dir) / "dataset_info.json", *map(Path, _paths(builder, names))]


def _paths(builder: Any, names: Sequence[str]) -> list[str]:
    return [str(each.filename) for each in builder.info.splits["+".join(names)].file_instructions]


def _filter(builder: Any, names: tuple[str, ...], records: TfdsRecords, filters: Filters) -> Sequence[Example]:
    """Returns the records that no filter drops; what is dropped is cached, since all records have to be read for it."""
    key, search = _key(builder, names, records, filters), functools.partial(filters.indices, records)
    dropped = search() if key is None else user_cache.cached("filters", key, search)
    filters.dropped.update({reason: len(indices) for reason, indices in dropped.items()})
    left_out = list(itertools.chain.from_iterable(dropped.values()))
    return Part(records, np.delete(np.arange(len(records)), left_out).tolist()) if left_out else records


def _key(builder: Any, names: tuple[str, ...], records: TfdsRecords, filters: Filters) -> dict[str, Any] | None:
    """Returns everything that decides which records are dropped; None if the files are not on this machine."""
    try:
        facts = [[path, (stat := os.stat(path)).st_size, stat.st_mtime_ns] for path in _paths(builder, names)]
    except (OSError, ValueError, KeyError, AssertionError):
        return None
    code = user_cache.source_digest(sys.modules[__name__], filtering, characters)
    settings = dataclasses.asdict(filters.data.filters) | {"training": filters.training}
    settings["clean_whitespace"] = filters.data.clean_whitespace
    return {"split": names, "files": facts, "fields": records.fields, "filters": settings, "code": code}


def _load_directions(cfg: Config, builder: Any) -> Corpus:
    """Loads the pairs of many languages into memory."""
    data, left_out, by_direction = cfg.data, {}, {}

    def examples(split: str) -> Iterator[Example]:
        for direction in read_directions(data, split):
            named = {} if data.language_fields else {"direction": str(direction)}
            for example in _split(builder, getattr(data, split), _fields(cfg, builder, direction), None):
                yield {**example, **named}

    def read(split: str) -> Iterator[Example]:
        training = split == "train"
        filters = Filters(data, training=training, once=False)
        left_out[split] = filters.dropped
        by_direction[split] = DirectionFilter(data, training=training, dropped=filters.dropped)
        return by_direction[split](filters(examples(split)))

    train, sizes = group_by_direction(data, list(read("train")), by_direction["train"].others)
    validation = list(read("validation"))
    test = list(read("test")) if data.test else validation
    for name, split in (("data.validation", validation), ("data.test", test)):
        check_held_out(data, sizes, name, split)
    return Corpus(train, validation, test, None, sizes, left_out=left_out)


def find(cfg: Config, root: Path | None) -> Any:
    """Returns TFDS's builder of `cfg.data.dataset`.

    Raises:
        DataError: the dataset is unknown to TFDS.
    """
    assert cfg.data.dataset is not None
    name = cfg.data.dataset.partition("/")[0].partition(":")[0]
    for module in (*TFDS_FAMILIES, *([f"tformer_jax.data.builders.{name}"] if name in BUILDERS else [])):
        importlib.import_module(module)
    try:
        return tfds.builder(cfg.data.dataset, data_dir=root, file_format="array_record")
    except (ParseError, RuntimeError) as error:
        reason = first_line(error)
        raise DataError(
            f"data.dataset={cfg.data.dataset!r}: its dataset_info.json is damaged ({reason}): build the dataset again"
        ) from error
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError) as error:
        reason = first_line(error)
        if "does not match the file formats" in reason:
            reason = (
                "is not stored as array_record, which is read without TensorFlow: build it with `tfds build "
                "--file_format=array_record`, or convert it with `tfds convert_format`"
            )
        elif root is not None and (folder := Path(root) / name).is_dir():
            versions = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
            reason = f"{reason.removesuffix('.')}; {folder} has {versions}"
        raise DataError(f"data.dataset={cfg.data.dataset!r}: {reason}") from error


def download(cfg: Config, root: Path | None, manual: Path | None = None) -> None:
    """Downloads the dataset and prepares it in `root`; `manual` is TFDS's folder of manually downloaded files.

    Raises:
        DataError: a download fails or does not match its checksum.
    """
    builder = find(cfg, root)
    try:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(manual_dir=manual), file_format="array_record"
        )
    except (OSError, AssertionError, NonMatchingChecksumError, tfds.download.DownloadError) as error:
        raise DataError(f"{cfg.data.dataset} cannot be prepared: {one_line(error, None)}") from error


def _fields(cfg: Config, builder: Any, direction: Direction) -> dict[str, str]:
    """Maps each key of an example to a feature of the dataset."""
    features = builder.info.features
    keys = task_of(cfg).keys
    fields = field_names(cfg.data, keys)
    if not cfg.data.fields and "source" in keys:
        fields |= {"source": direction.source, "target": direction.target}
    elif not cfg.data.fields and "text" not in features:
        texts = [name for name, feature in features.items() if isinstance(feature, tfds.features.Text)]
        fields |= {"text": texts[0]} if len(texts) == 1 else {}
    for field in fields.values():
        if _feature(features, field) is None:
            raise DataError(f"{builder.name} has no field {field!r}, only {', '.join(features)}: set data.fields")
    return fields


def _feature(features: Any, field: str) -> Any:
    """Returns the feature of a field, which may be within another (`a.b`); None if there is none."""
    if field in features:
        return features[field]
    outer, dot, inner = field.partition(".")
    nested = dot and outer in features and isinstance(features[outer], tfds.features.FeaturesDict)
    return _feature(features[outer], inner) if nested else None


def _labels(builder: Any, fields: dict[str, str]) -> tuple[str, ...] | None:
    """Returns the names of the classes; None without labels, or if examples have integers or texts in their place.

    Raises:
        DataError: the field is none of these, or two names differ only in white space.
    """
    if "label" not in fields:
        return None
    feature = _feature(builder.info.features, fields["label"])
    if isinstance(feature, tfds.features.ClassLabel):
        names = tuple(map(clean_whitespace, feature.names))
        for name, cleaned in zip(feature.names, names, strict=True):
            if (first := feature.names[names.index(cleaned)]) != name:
                raise DataError(f"two labels of {builder.name} differ only in white space: {first!r}, {name!r}")
        return names
    integer = not feature.shape and feature.np_dtype is not None and np.issubdtype(feature.np_dtype, np.integer)
    if not integer and not isinstance(feature, tfds.features.Text):
        raise DataError(f"field {fields['label']!r} of {builder.name} is no label: set data.fields")
    return None


def _split(builder: Any, names: tuple[str, ...], fields: dict[str, str], labels: tuple[str, ...] | None) -> TfdsRecords:
    split = "+".join(names)
    try:
        is_empty = builder.info.splits and builder.info.splits[split].num_examples <= 0
        source = None if is_empty else builder.as_data_source(split=split)
    except (ValueError, KeyError, AssertionError) as error:
        if builder.info.splits:
            splits = ", ".join(builder.info.splits)
            reason = str(error).strip().splitlines()[-1]
            raise DataError(f"{builder.name} has no split {split!r}; it has {splits} ({reason})") from error
        raise DataError(
            f"{builder.name} is not prepared as array_record in {builder.data_dir}: run python scripts/prepare_data.py "
            "--download with this config, or name the folder that contains it with --data DIR"
        ) from error
    if source is None:
        raise DataError(f"split {split!r} of {builder.name} has no example: name a larger part of it")
    return TfdsRecords(source, fields, labels)
