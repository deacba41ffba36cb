"""Writes a corpus to array_record files of texts and token ids, which `corpora/array_records.py` reads."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from tformer_jax.base.paths import checksum, replacing_folder
from tformer_jax.config import Config, kinds, to_dict
from tformer_jax.config.task import task_of
from tformer_jax.data.columns import TokenIds, split_examples
from tformer_jax.data.corpora import DataError, Splits, stream_corpus
from tformer_jax.data.corpora.array_records import LENGTH, SUFFIXES, encode_record, id_dtype
from tformer_jax.data.corpora.corpus import CHATS, Endless
from tformer_jax.data.corpora.example import NO_TEXT
from tformer_jax.data.corpora.prepared import FORMAT, TOKENIZER_SETTINGS, TOKENIZERS, stored_keys
from tformer_jax.data.corpora.splits import no_example
from tformer_jax.data.features import document_end, tokenize
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.training import adopt_tokenizers, tokenizer_path, train_tokenizers

EXAMPLES_PER_CHUNK = 1024
"""Number of examples to tokenize at once."""
OF_BATCHES = (
    *("transforms", "noise", "batching", "bucket_lengths", "batch_tokens", "batch_multiple", "batch_size", "window"),
    *("source_window", "long_documents", "long_pairs", "workers"),
)
"""Settings of `data` that change batches, and nothing that is stored."""
WRITER_OPTIONS = "group_size:1,uncompressed"
"""Options of array_record: records are read one at a time, and token ids hardly compress."""

Progress = Callable[[str, int], None]
"""Called with a split and the number of its examples written since the last call."""


@dataclasses.dataclass
class Summary:
    """Statistics of one split."""

    files: list[str]
    examples: int = 0
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of tokens by key of the example."""
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of examples by the length of their longest side, rounded up to a power of two."""
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of malformed lines and of examples that filters dropped, of what is named for this split, by reason."""
    directions: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of examples of each direction, in the order of the records."""

    def count(self, ids: TokenIds, direction: str | None) -> None:
        """Adds one example."""
        self.examples += 1
        if direction is not None:
            self.directions[direction] = self.directions.get(direction, 0) + 1
        sizes = {key: len(tokens) for key, tokens in ids.items() if key not in NO_TEXT}
        for key, size in sizes.items():
            self.tokens[key] = self.tokens.get(key, 0) + size
        bound = 1 << max(max(sizes.values()) - 1, 0).bit_length()
        self.lengths[bound] = self.lengths.get(bound, 0) + 1


def prepare(
    cfg: Config,
    root: Path | None,
    folder: Path,
    *,
    tokenizers: Tokenizers | None = None,
    shards: int = 1,
    progress: Progress = lambda split, count: None,
) -> dict[str, Summary]:
    """Writes the corpus of a config to `folder`, completely or not at all, replacing its contents.

    Args:
        root: the data folder, for sources in files.
        tokenizers: tokenizers of source and target; None: load or train them as `cfg.data` describes.
        shards: number of array_record files per split; a split smaller than a chunk has one.

    Raises:
        DataError: the corpus cannot be read, one of its splits is empty, or it is endless.
        UserError: `cfg.data.weights`, `stages` or `links` is set, the tokenizers cannot be trained, or given ones do
            not normalize as `cfg.data` says.
    """
    if mixed := cfg.data.mixed:
        problem = "is not stored in prepared data; prepare each entry of data.train alone, and mix the folders when you"
        raise cfg.data.error(mixed, f"{problem} train")
    if cfg.data.links is not None:
        raise cfg.data.error("links", "is not stored in prepared data: train on the files directly, or write None")
    if task_of(cfg).keys == CHATS:
        raise cfg.data.error("source", "cannot be prepared for conversations: train on their files directly")
    splits = stream_corpus(cfg, root)
    if isinstance(splits.train, Endless):
        raise DataError(f"data.source={cfg.data.source!r} is generated on the fly and endless: train on it directly")
    given, train, origins = tokenizers, splits.train, origin(cfg, root, tokenizers, shards)
    tokenizers = adopt_tokenizers(cfg.data, given, train) if given else train_tokenizers(cfg.data, train, root)
    if task_of(cfg).keys == ("text",) and document_end(tokenizers.target) is None:
        raise DataError("the vocabulary has no token that separates documents: train on the text directly")
    summaries = {}
    with replacing_folder(folder) as partial:
        tokenizers.save(partial / TOKENIZERS)
        for split in ("train", "validation", "test"):
            summaries[split] = _write_split(cfg, partial, split, splits, tokenizers, shards, progress)
        for split, counts in splits.left_out.items():
            summaries[split].skipped = counts
        metadata = {
            "format": FORMAT,
            "family": cfg.model.family,
            "labels": splits.labels,
            "vocab_size": max(tokenizers.source.vocab_size, tokenizers.target.vocab_size),
            "end": tokenizers.target.special.eos[0],
            "splits": {name: dataclasses.asdict(summary) for name, summary in summaries.items()},
            "tokenizers": _digest(tokenizers),
            "checksums": _checksums(partial),
            "seed": cfg.seed,
            **origins,
        }
        text = json.dumps(metadata, indent=2, ensure_ascii=False)
        (partial / "dataset.json").write_text(f"{text}\n", encoding="utf-8")
    return summaries


def is_prepared(folder: Path) -> bool:
    """Returns whether a folder holds prepared data and nothing else."""
    try:
        metadata = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    names = {"dataset.json", TOKENIZERS, ".DS_Store"}
    names |= {path.name for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")}
    return {"format", "tokenizers", "splits"} <= {*metadata} and all(path.name in names for path in folder.iterdir())


def _write_split(
    cfg: Config, folder: Path, split: str, splits: Splits, tokenizers: Tokenizers, shards: int, progress: Progress
) -> Summary:
    """Writes the records of a split, spread over its files, and for plain text the stream of all tokens."""
    examples, keys = iter(getattr(splits, split)), stored_keys(cfg)
    dtype = id_dtype(max(tokenizers.source.vocab_size, tokenizers.target.vocab_size))
    chunks = iter(lambda: list(itertools.islice(examples, EXAMPLES_PER_CHUNK)), [])
    first = next(chunks, None)
    if first is None:
        raise no_example(split, getattr(splits, split))
    count = shards if len(first) == EXAMPLES_PER_CHUNK else 1
    names = [f"{split}-{number:05}-of-{count:05}.array_record" for number in range(count)]
    summary = Summary(names)
    with contextlib.ExitStack() as files:
        writers = [ArrayRecordWriter(str(folder / name), WRITER_OPTIONS) for name in names]
        for writer in writers:
            files.callback(writer.close)
        lengths = files.enter_context((folder / f"{split}.lengths").open("wb"))
        stream = files.enter_context((folder / f"{split}.tokens").open("wb")) if keys == ("text",) else None
        for chunk in itertools.chain([first], chunks):
            block = tokenize(chunk, tokenizers, splits.labels)
            for example, ids in zip(chunk, split_examples(block), strict=True):
                if stream is not None:
                    separator = [tokenizers.target.special.eos[0]] if summary.examples else []
                    stream.write(np.array([*separator, *ids["text"]], dtype).tobytes())
                record = encode_record([example[key] for key in keys], [ids[key] for key in keys], dtype)
                writers[summary.examples % count].write(record)
                lengths.write(np.array([len(ids[key]) for key in keys], LENGTH).tobytes())
                summary.count(ids, example.get("direction"))
            progress(split, len(chunk))
    return summary


def stored_origin(folder: Path) -> dict[str, Any]:
    """Returns the `origin` of prepared data; earlier versions stored only its settings."""
    metadata = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    metadata["data"] = {name: value for name, value in metadata["data"].items() if name not in OF_BATCHES}
    return {topic: metadata[topic] for topic in ("options", "files", "data") if topic in metadata}


def origin(cfg: Config, root: Path | None, given: Tokenizers | None, shards: int) -> dict[str, Any]:
    """Returns what determines prepared data: settings, given tokenizers, and the checksums of files."""
    unused = (*OF_BATCHES, *(TOKENIZER_SETTINGS if given else ()))
    files = [*kinds.load(kinds.CORPORA, cfg.data.source).files(cfg, root)]
    if cfg.data.tokenizer_file and not given:
        path = tokenizer_path(cfg.data, root)
        folders = [folder for folder in (path / TOKENIZERS, path) if folder.is_dir()]
        files += sorted(file for file in folders[0].iterdir() if file.is_file()) if folders else [path]
    tokenizers = _digest(given) if given else None
    return {
        "options": {"family": cfg.model.family, "seed": cfg.seed, "shards": shards, "tokenizers": tokenizers},
        "files": {os.path.relpath(path, root or "."): checksum(path)[:16] for path in files if path.is_file()},
        "data": {name: value for name, value in to_dict(cfg.data).items() if name not in unused},
    }


def _checksums(folder: Path) -> dict[str, str | None]:
    """Returns the checksum of each file, by relative path; None for records and tokens, which may be large."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    large = (".array_record", ".tokens")
    return {path.relative_to(folder).as_posix(): None if path.suffix in large else checksum(path) for path in files}


def _digest(tokenizers: Tokenizers) -> str:
    return hashlib.sha256(json.dumps(tokenizers.to_json(), sort_keys=True).encode()).hexdigest()
