"""Examples that `tformer_jax.train` and `tformer_jax.batches` are given in Python."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.arguments import type_with_article
from tformer_jax.config import Config
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora.chats import read_chat
from tformer_jax.data.corpora.corpus import CHATS, Corpus, DataError, Example, Source
from tformer_jax.data.corpora.lines import NOT_A_CHARACTER, is_unicode
from tformer_jax.data.corpora.records import with_direction

SPLITS = ("train", "validation", "test")
MAX_READ = 10_000_000
"""Maximum number of examples of a split; they are held in memory, and a resumed run compares all of them."""


class PythonData(Source):
    """The data of a run that was trained in Python; no command can read it again."""

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

    They are read into memory, so that a resumed run, whose examples must be equal, continues exactly.

    Args:
        data: `{"train": ..., "validation": ..., "test": ...}`; without "test", the validation split is tested.

    Raises:
        DataError: a split is missing, empty or endless, or an example does not have the keys of the task.
    """
    if not isinstance(data, Mapping) or not {"train", "validation"} <= data.keys() <= set(SPLITS):
        given = sorted(data) if isinstance(data, Mapping) else type_with_article(data)
        raise DataError(f"data is {given}: write {{'train': texts, 'validation': others}}, and 'test' if there is one")
    keys = task_of(cfg).keys
    splits = {name: _read_split(name, examples, keys) for name, examples in data.items()}
    labels = tuple(sorted({example["label"] for example in splits["train"]})) if "label" in keys else None
    for name, examples in splits.items():
        if labels and (unknown := {example["label"] for example in examples} - {*labels}):
            raise DataError(f"{name} has the label {min(unknown)!r}, which no example of train has")
    return Corpus(splits["train"], splits["validation"], splits.get("test", splits["validation"]), labels)


def python_examples(cfg: Config, examples: Any) -> Corpus:
    """Returns the corpus whose splits all are `examples`, as for `python_corpus`; raises as it does."""
    if isinstance(examples, Mapping):
        raise DataError(f"data is a dictionary of {', '.join(map(str, examples))}: pass the examples of one split")
    split = _read_split("train", examples, task_of(cfg).keys)
    return python_corpus(cfg, dict.fromkeys(("train", "validation"), split))


def _read_split(name: str, examples: Iterable[Any], keys: tuple[str, ...]) -> Sequence[Example]:
    if isinstance(examples, str | bytes | Mapping) or not isinstance(examples, Iterable):
        raise DataError(f"data[{name!r}] is {type_with_article(examples)}: pass a sequence of examples")
    numbered = enumerate(itertools.islice(examples, MAX_READ + 1))
    split = [read_example(example, keys, f"{name} example {number}") for number, example in numbered]
    if len(split) > MAX_READ:
        raise DataError(f"data[{name!r}] has more than {MAX_READ:,} examples: write them to files, see data.source")
    if not split:
        raise DataError(f"data[{name!r}] is empty; an iterator can be read only once: pass a list")
    return split


def read_example(example: Any, keys: tuple[str, ...], where: str) -> Example:
    """Returns an example as a dictionary with the keys of its task; a conversation may also be a list of messages.

    Raises:
        DataError: it is of another form; the message begins with `where`.
    """
    if keys == CHATS:
        try:
            return read_chat(example if isinstance(example, Mapping) else {"messages": example})
        except DataError as error:
            raise DataError(f"{where} {error}") from None
    if isinstance(example, Mapping):
        parts = [example.get(key) for key in keys]
    else:
        parts = [example] if isinstance(example, str) else [*example] if isinstance(example, Sequence) else []
        parts = example.tolist() if isinstance(example, np.ndarray) and example.ndim else parts
    if len(parts) != len(keys) or not all(isinstance(part, str) for part in parts):
        shown = f"an array of {example.dtype}" if isinstance(example, np.ndarray) else type_with_article(example)
        form = "a text (str)" if len(keys) == 1 else f"({', '.join(keys)}), all of them str"
        raise DataError(f"{where} is {shown}, {str(example)[:40]!r}: this task reads {form}")
    texts = [str(part) for part in parts]
    if wrong := [text for text in texts if not is_unicode(text)]:
        raise DataError(f"{where}: {wrong[0][:40]!r} {NOT_A_CHARACTER}")
    extra = {"direction": example["direction"]} if isinstance(example, Mapping) and "direction" in example else {}
    return {**with_direction(dict(zip(keys, texts, strict=True))), **extra}
