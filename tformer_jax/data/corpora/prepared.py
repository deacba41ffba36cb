"""The source of prepared data: folders that `scripts/prepare_data.py` wrote, as `array_records` describes."""

import collections
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.paths import checksum
from tformer_jax.config import Config, DataConfig, kinds, to_dict
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora.array_records import JoinedRecords, Records, id_dtype
from tformer_jax.data.corpora.corpus import DIRECTIONS, FILE_SETTINGS, Corpus, DataError, Source
from tformer_jax.data.corpora.splits import NAMES
from tformer_jax.special_tokens import EOS

FORMAT = 2
METADATA = {"family", "labels", "vocab_size", "tokenizers", "splits", "data"}
"""Keys of dataset.json that are read."""
TOKENIZERS = "tokenizers"
TOKENIZER_SETTINGS = (
    *("tokenizer", "source_tokenizer", "target_tokenizer", "tokenizer_file"),
    *("vocab_size", "split_digits", "shared_vocab", "tokenizer_examples", "tokenizer_temperature"),
    *("character_coverage", "byte_fallback", "symbols"),
)
"""Settings that determine the tokenizers; not in dataset.json if the tokenizers were given."""
LANGUAGE_SETTINGS = ("source_language", "target_language", "both_directions", "language_fields")
STORED_SETTINGS = ("validation", "test", "validation_fraction", "fields", "header", "filters", "zero_shot")
"""Settings whose effect is stored; values other than the stored ones or the defaults have no effect."""


class Prepared(Source):
    """The prepared folders that `data.train` names; each split concatenates the folders that have it."""

    settings = (
        *(*FILE_SETTINGS, *DIRECTIONS, "language_fields", "fields", "languages", "dataset", "heldout_examples"),
        *("on_bad_line", "header", "filters"),
    )
    examples = None
    entry = "the folder that scripts/prepare_data.py wrote"

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` for workers, which could only read what a thread reads."""
        if data.workers and data.batching != "windows" and not data.transforms:
            raise data.error("workers", "must be 0 with data.source='prepared', whose tokens one thread reads")

    @classmethod
    def files(cls, cfg: Config, root: Path | None) -> list[Path]:
        """Returns the descriptions of the folders."""
        return [Path(root or "") / name / "dataset.json" for name in cfg.data.train]

    @classmethod
    def check_present(cls, cfg: Config, root: Path | None) -> None:
        cls.load(cfg, root)

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        """Opens the folders; logs which have no test split, if others have, or the same held-out split as others.

        Raises:
            DataError: a folder has no prepared data, is damaged or of another family, or its tokenizers or labels
                differ from the first folder's.
            UserError: a setting names data that is not in a folder.
        """
        folders = [Path(root or "") / name for name in cfg.data.train]
        metadata = [_metadata(folder, cfg) for folder in folders]
        for folder, entry in zip(folders, metadata, strict=True):
            if (entry["tokenizers"], entry["labels"]) != (metadata[0]["tokenizers"], metadata[0]["labels"]):
                raise DataError(
                    f"{folder} differs from {folders[0]} in its tokenizers or labels: prepare both with the "
                    "same tokenizers"
                )
        _check_directions(cfg, folders, metadata)
        keys = stored_keys(cfg)
        dtype = id_dtype(metadata[0]["vocab_size"])

        def parts(split: str) -> list[Records]:
            return [
                Records(folder, split, own["files"], own["examples"], keys, dtype, entry.get("end", EOS))
                for folder, entry in zip(folders, metadata, strict=True)
                for own in [entry["splits"][split]]
            ]

        labels = tuple(metadata[0]["labels"]) if metadata[0]["labels"] is not None else None
        tested = [number for number, entry in enumerate(metadata) if _has_test(entry)]
        used = {"train": parts("train"), "validation": _without_copies(parts("validation"))}
        used["test"] = _without_copies([parts("test")[number] for number in tested]) if tested else used["validation"]
        if 0 < len(tested) < len(folders):
            without = ", ".join(str(folder) for number, folder in enumerate(folders) if number not in tested)
            logging.getLogger(__name__).warning("no test split: %s; the test examples are from the others", without)
        described = dict(zip(folders, metadata, strict=True))
        left_out = {split: _left_out([described[part.folder] for part in used[split]], split) for split in NAMES}
        validation, train, directions = _join(used["validation"]), used["train"], None
        if cfg.data.multilingual:
            train, directions = _by_direction(train, [entry["splits"]["train"]["directions"] for entry in metadata])
        test = _join(used["test"]) if tested else validation
        return Corpus(_join(train), validation, test, labels, directions, folders[0] / TOKENIZERS, left_out)


def _check_directions(cfg: Config, folders: Sequence[Path], metadata: Sequence[dict[str, Any]]) -> None:
    """Raises `DataError` unless `data.directions` are those that the folders were prepared with, in their order."""
    listed = [entry["data"].get("directions", []) for entry in metadata]
    prepared, wanted = list(dict.fromkeys(itertools.chain.from_iterable(listed))), list(cfg.data.directions)
    if prepared and [] in listed:
        raise DataError(
            f"{folders[listed.index([])]} was prepared without data.directions, and others with {prepared!r}: prepare "
            "all folders with data.directions, or none"
        )
    if prepared != wanted:
        names = " and ".join(map(str, folders))
        was = "was" if len(folders) == 1 else "were"
        raise DataError(f"{names} {was} prepared with data.directions={prepared!r}, not {wanted!r}: write {prepared!r}")


def stored_keys(cfg: Config) -> tuple[str, ...]:
    """Returns the keys of an example of prepared data."""
    return (*task_of(cfg).keys, "direction") if cfg.data.multilingual else task_of(cfg).keys


def _left_out(metadata: Sequence[dict[str, Any]], split: str) -> collections.Counter[str]:
    """Returns what was left out of a split when the folders were prepared."""
    counts = collections.Counter[str]()
    for entry in metadata:
        counts.update(entry["splits"][split].get("skipped", {}))
    return counts


def _without_copies(parts: Sequence[Records]) -> list[Records]:
    """Returns the held-out splits of several folders without those that repeat one before; logs these.

    Folders to be mixed are prepared one by one, often with the same held-out files.
    """
    different: list[Records] = []
    for records in parts:
        same = next((other for other in different if records.is_copy(other)), None)
        if same is None:
            different.append(records)
        else:
            texts = records.split, records.folder, same.folder
            logging.getLogger(__name__).warning("the %s split of %s is the one of %s: it is read once", *texts)
    return different


def _join(parts: list[Records]) -> Records | JoinedRecords:
    return parts[0] if len(parts) == 1 else JoinedRecords(parts)


def _by_direction(folders: Sequence[Records], sizes: Sequence[dict[str, int]]) -> tuple[list[Records], dict[str, int]]:
    """Returns the records of several folders by direction, and the number of examples of each."""
    groups: dict[str, list[Records]] = {name: [] for folder in sizes for name in folder}
    for records, folder in zip(folders, sizes, strict=True):
        start = 0
        for name, size in folder.items():
            groups[name].append(records.select(start, size))
            start += size
    parts = [part for group in groups.values() for part in group]
    return parts, {name: sum(map(len, group)) for name, group in groups.items()}


def _has_test(metadata: dict[str, Any]) -> bool:
    """Returns whether the test split of a folder is not a copy of its validation split."""
    data = metadata["data"]
    source = data.get("source")
    own_splits = source in kinds.CORPORA and "test" not in kinds.load(kinds.CORPORA, source).settings
    return own_splits or data.get("test") != []


def check_files(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Raises `DataError` if a file of prepared data is missing, or differs from its checksum, if it has any."""
    for name, expected in metadata.get("checksums", {}).items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} does not exist: prepare the data again")
        if expected is not None and checksum(path) != expected:
            raise DataError(f"{path} is not the file that was prepared: restore it, or prepare the data again")


def _metadata(folder: Path, cfg: Config) -> dict[str, Any]:
    path = folder / "dataset.json"
    if folder.is_file():
        raise DataError(f"{folder} is a file: name the folder that scripts/prepare_data.py wrote")
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(metadata, dict) or "format" not in metadata:
            raise DataError(f"{path} was not written by scripts/prepare_data.py")
        if metadata["format"] != FORMAT:
            raise DataError(f"{path} has format {metadata['format']}, not {FORMAT}: prepare the data again")
        if missing := METADATA - metadata.keys():
            raise DataError(f"{path} is damaged: it has no {min(missing)!r}")
    except FileNotFoundError:
        raise DataError(f"{folder} is not the output of scripts/prepare_data.py: it has no dataset.json") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged: {error}") from error
    check_files(folder, metadata)
    settings = {"model.family": metadata["family"], "data.objective": metadata["data"].get("objective")}
    for name, value in {"model.family": cfg.model.family, "data.objective": cfg.data.objective}.items():
        if settings[name] != value:
            raise DataError(f"{folder} was prepared for {name}={settings[name]!r}, not {value!r}")
    prepared, wanted = {"placeholders": []} | metadata["data"], json.loads(json.dumps(to_dict(cfg.data)))
    for name in (*LANGUAGE_SETTINGS, "clean_whitespace", "normalize", "placeholders", *TOKENIZER_SETTINGS):
        if name in prepared and (before := prepared[name]) != (now := wanted[name]):
            raise DataError(f"{folder} was prepared with data.{name}={before!r}, not {now!r}: write {before!r}")
    for name in {*STORED_SETTINGS} & {changed.partition(".")[0] for changed in cfg.data.changed_settings()}:
        if wanted[name] != prepared.get(name):
            problem = f"is not read, because {folder} was prepared with {prepared.get(name)!r}"
            raise cfg.data.error(name, f"{problem}: leave it out, or prepare the data again")
    return metadata
