"""Examples that `tformer_jax.train` and `tformer_jax.batches` are given in Python."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.config import Config
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora.corpus import Corpus, DataError, Example, Source

SPLITS = ("train", "validation", "test")
MAX_READ = 10_000_000
"""Maximum number of examples of an iterable without an index, which is held in memory."""


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


class Converted(Sequence[Example]):
    """A view of a sequence that is too large, or too lazy, for memory; its elements are converted on access."""

    def __init__(self, parent: Sequence[Any], keys: tuple[str, ...], split: str):
        self._parent, self._keys, self._split = parent, keys, split

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return read_example(self._parent[int(index)], self._keys, f"{self._split} example {index}")


def python_corpus(cfg: Config, data: Any) -> Corpus:
    """Returns the corpus of examples of `cfg`'s task, each a text, a tuple of texts or a dictionary.

    Sequences keep their order, so that a resumed run continues exactly; other iterables are read into memory.

    Args:
        data: `{"train": ..., "validation": ..., "test": ...}`; without "test", the validation split is tested.

    Raises:
        DataError: a split is missing, empty or endless, or an example does not have the keys of the task.
    """
    if not isinstance(data, Mapping) or not {"train", "validation"} <= data.keys() <= set(SPLITS):
        given = sorted(data) if isinstance(data, Mapping) else type(data).__name__
        raise DataError(f"data is {given}: write {{'train': texts, 'validation': others}}, and 'test' if there is one")
    keys = task_of(cfg).keys
    splits = {name: _read_split(name, examples, keys) for name, examples in data.items()}
    labels = tuple(sorted({example["label"] for example in splits["train"]})) if "label" in keys else None
    for name, examples in splits.items():
        if labels and (unknown := {example["label"] for example in examples} - {*labels}):
            raise DataError(f"{name} has the label {min(unknown)!r}, which no example of train has")
    return Corpus(splits["train"], splits["validation"], splits.get("test", splits["validation"]), labels)


def _read_split(name: str, examples: Iterable[Any], keys: tuple[str, ...]) -> Sequence[Example]:
    if isinstance(examples, str | bytes | Mapping) or not isinstance(examples, Iterable):
        raise DataError(f"data[{name!r}] is a {type(examples).__name__}: pass a sequence of examples")
    if isinstance(examples, Sequence) and not isinstance(examples, list | tuple):
        found: Sequence[Example] = Converted(examples, keys, name)
    else:
        numbered = enumerate(itertools.islice(examples, MAX_READ + 1))
        found = [read_example(example, keys, f"{name} example {number}") for number, example in numbered]
        if len(found) > MAX_READ:
            raise DataError(
                f"data[{name!r}] has more than {MAX_READ:,} examples and no index, without which a run cannot be "
                "resumed: pass a Sequence, with __len__ and __getitem__"
            )
    if not len(found):
        raise DataError(f"data[{name!r}] is empty; an iterator can be read only once: pass a list")
    return found


def read_example(example: Any, keys: tuple[str, ...], where: str) -> Example:
    """Returns an example as a dictionary with the keys of its task.

    Raises:
        DataError: it is of another form; the message begins with `where`.
    """
    if isinstance(example, Mapping):
        parts = [example.get(key) for key in keys]
    else:
        parts = [example] if isinstance(example, str) else [*example] if isinstance(example, Sequence) else []
        parts = example.tolist() if isinstance(example, np.ndarray) and example.ndim else parts
    if len(parts) != len(keys) or not all(isinstance(part, str) for part in parts):
        shown = f"array of {example.dtype}" if isinstance(example, np.ndarray) else type(example).__name__
        form = "a text" if len(keys) == 1 else f"({', '.join(keys)})"
        raise DataError(f"{where} is a {shown} {str(example)[:40]!r}: this task reads {form}, all of them str")
    extra = {"direction": example["direction"]} if isinstance(example, Mapping) and "direction" in example else {}
    return {key: str(part) for key, part in zip(keys, parts, strict=True)} | extra
