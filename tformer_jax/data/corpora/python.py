"""Examples that `tformer_jax.train` and `tformer_jax.batches` are given in Python."""

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.checks import type_with_article
from tformer_jax.config import Config
from tformer_jax.config.task import task_of
from tformer_jax.data.characters import is_blank
from tformer_jax.data.corpora.chats import read_chat
from tformer_jax.data.corpora.corpus import CHATS, Corpus, DataError, Example, Source
from tformer_jax.data.corpora.filters import Filters
from tformer_jax.data.corpora.lines import NOT_A_CHARACTER, is_unicode
from tformer_jax.data.corpora.records import is_integer, with_direction

SPLITS = ("train", "validation", "test")
MAX_READ = 10_000_000
"""Maximum number of examples of a split; they are held in memory, and a resumed run compares all of them."""


class PythonData(Source):
    """The data of a run that was trained in Python; no command can read it again."""

    settings = ("filters",)
    examples = None
    reads_chats = True

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        raise DataError(
            "data.source='python': the data was given in Python; pass it to tformer_jax.train(cfg, data=...), "
            "or name files by data.source and data.train"
        )


def python_corpus(cfg: Config, data: Any) -> Corpus:
    """Returns the corpus of examples of `cfg`'s task, each a text, a tuple of texts or a dictionary.

    With `data.tokenizer="ids"`, a text may be a sequence or an array of integers, and a split of texts such an array.
    Examples are read into memory, so that a resumed run, whose examples must be equal, continues exactly. Those that
    `data.filters` drop are counted in `left_out`.

    Args:
        data: `{"train": ..., "validation": ..., "test": ...}`; without "test", the validation split is tested.

    Raises:
        DataError: a split is missing, empty or endless, an example does not have the keys of the task, or all have the
            same label.
    """
    if not isinstance(data, Mapping) or not {"train", "validation"} <= data.keys() <= set(SPLITS):
        given = sorted(map(str, data)) if isinstance(data, Mapping) else type_with_article(data)
        raise DataError(f"data is {given}: write {{'train': texts, 'validation': others}}, and 'test' if there is one")
    corpus = _corpus(cfg, {name: _read_split(name, examples, cfg) for name, examples in data.items()})
    if corpus.labels and len(corpus.labels) == 1:
        raise DataError(f"train has only the label {corpus.labels[0]!r}: a classifier needs at least two")
    return corpus


def python_examples(cfg: Config, examples: Any) -> Corpus:
    """Returns the corpus whose splits all are `examples`, as for `python_corpus`; says what it leaves out.

    Raises:
        DataError: as `python_corpus`; but one label is enough.
    """
    if isinstance(examples, Mapping):
        raise DataError(f"data is a dictionary of {', '.join(map(str, examples))}: pass the examples of one split")
    corpus = _corpus(cfg, {"train": _read_split("train", examples, cfg)})
    if left_out := corpus.left_out["train"]:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        logging.getLogger(__name__).warning("left out by data.filters: %s", counts)
    return corpus


def _corpus(cfg: Config, given: Mapping[str, Sequence[Example]]) -> Corpus:
    keys, splits, left_out = task_of(cfg).keys, dict[str, list[Example]](), {}
    for name, examples in given.items():
        filters = Filters(cfg.data, training=name == "train")
        splits[name] = list(filters(examples))
        left_out[name] = dict(filters.dropped)
        if not splits[name]:
            raise DataError(f"data[{name!r}] has no example that data.filters leave{filters.explanation()}")
    labels = tuple(sorted({example["label"] for example in splits["train"]})) if "label" in keys else None
    for name, examples in splits.items():
        if labels and (unknown := {example["label"] for example in examples} - {*labels}):
            raise DataError(f"{name} has the label {min(unknown)!r}, which no example of train has")
    validation = splits.get("validation", splits["train"])
    return Corpus(splits["train"], validation, splits.get("test", validation), labels, left_out=left_out)


def _read_split(name: str, examples: Iterable[Any], cfg: Config) -> Sequence[Example]:
    keys, ids = task_of(cfg).keys, _keys_of_ids(cfg)
    if keys == ids and len(keys) == 1 and _ids_as_text(examples) is not None:
        examples = [examples]
    is_scalar = getattr(examples, "ndim", None) == 0
    if isinstance(examples, str | bytes | Mapping) or not isinstance(examples, Iterable) or is_scalar:
        raise DataError(f"data[{name!r}] is {type_with_article(examples)}: pass a sequence of examples")
    numbered = enumerate(itertools.islice(examples, MAX_READ + 1))
    split = [read_example(example, keys, f"{name} example {number}", ids=ids) for number, example in numbered]
    if len(split) > MAX_READ:
        raise DataError(f"data[{name!r}] has more than {MAX_READ:,} examples: write them to files, see data.source")
    if not split:
        raise DataError(f"data[{name!r}] is empty; an iterator can be read only once: pass a list")
    return split


def read_example(example: Any, keys: tuple[str, ...], where: str, *, ids: Collection[str] = ()) -> Example:
    """Returns an example as a dictionary with the keys of its task; a conversation may also be a list of messages.

    Args:
        ids: keys of texts that may also be a sequence or an array of integers, which is written as numbers.

    Raises:
        DataError: it is of another form; the message begins with `where`.
    """
    if keys == CHATS:
        try:
            return read_chat(example if isinstance(example, Mapping) else {"messages": example})
        except DataError as error:
            raise DataError(f"{where} {error}") from None
    parts = _parts_of(example, keys)
    if keys[-1] == "label" and is_integer(parts[-1]):
        parts = [*parts[:-1], str(parts[-1])]
    if len(parts) == len(keys):
        given = [_ids_as_text(part) if key in ids else None for key, part in zip(keys, parts, strict=True)]
        parts = [part if text is None else text for part, text in zip(parts, given, strict=True)]
    if len(parts) != len(keys) or not all(isinstance(part, str) for part in parts):
        array = isinstance(example, np.ndarray)
        shown = f"an array of {example.dtype}" if array else type_with_article(example)
        form = "a text (str)" if len(keys) == 1 else f"({', '.join(keys)}), all of them str"
        if {*keys} - {*ids, "label"} and any(_ids_as_text(part) for part in parts):
            form += "; of token ids with data.tokenizer='ids'"
        raise DataError(f"{where} is {shown}, {str(example)[:40]!r}: this task reads {form}")
    texts = [str(part) for part in parts]
    if wrong := [text for text in texts if not is_unicode(text)]:
        raise DataError(f"{where}: {wrong[0][:40]!r} {NOT_A_CHARACTER}")
    if keys[-1] == "label" and is_blank(texts[-1]):
        raise DataError(f"{where} has a blank label")
    extra = {"direction": example["direction"]} if isinstance(example, Mapping) and "direction" in example else {}
    return {**with_direction(dict(zip(keys, texts, strict=True))), **extra}


def _keys_of_ids(cfg: Config) -> tuple[str, ...]:
    """Returns the keys of the texts whose tokenizer reads token ids."""
    source, target = cfg.data.tokenizer_kinds
    kinds = {"source": source, "target": target, "text": target}
    return tuple(key for key in task_of(cfg).keys if kinds.get(key) == "ids")


def _parts_of(example: Any, keys: tuple[str, ...]) -> list[Any]:
    if isinstance(example, Mapping):
        return [example.get(key) for key in keys]
    if len(keys) == 1 and (isinstance(example, str) or _ids_as_text(example) is not None):
        return [example]
    if isinstance(example, np.ndarray) and example.ndim == 1:
        return example.tolist()
    is_sequence = isinstance(example, Sequence) and not isinstance(example, str)
    return [*example] if is_sequence or getattr(example, "ndim", None) else [example]


def _ids_as_text(part: Any) -> str | None:
    """Returns a sequence or an array of integers as a text of numbers; None: it is something else."""
    if not (isinstance(part, list | tuple | range) or getattr(part, "ndim", None) == 1):
        return None
    values = np.asarray(part).tolist() if hasattr(part, "ndim") else part
    is_ids = all(map(is_integer, values))
    return " ".join(map(str, map(int, values))) if is_ids else None
