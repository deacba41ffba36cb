"""What `tests.programs.fuzz` saw and what was wrong, and the files that it writes and reads."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tformer_jax.config import Config, kinds
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora import Example
from tformer_jax.data.corpora.files import FileSource
from tformer_jax.data.corpora.lines import BadLines
from tformer_jax.data.corpora.splits import read_directions


class Findings:
    """How many texts each path saw, and what was wrong."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.faults: dict[str, list[dict[str, str]]] = {}

    def saw(self, path: str, count: int) -> None:
        """Adds a number of texts to those of a path."""
        self.texts[path] = self.texts.get(path, 0) + count

    def fault(self, what: str, text: Any, **values: Any) -> None:
        """Records that something is wrong for a text."""
        examples = self.faults.setdefault(what, [])
        examples.append({"text": ascii(text), **{name: ascii(value) for name, value in values.items()}})

    def equal(self, what: str, texts: Sequence[Any], results: Sequence[Any], expected: Sequence[Any]) -> None:
        """Records the texts whose results differ from the expected ones."""
        if len(results) != len(texts) or len(expected) != len(texts):
            self.fault(what, f"{len(texts)} texts", results=len(results), expected=len(expected))
        for text, result, wanted in zip(texts, results, expected, strict=False):
            if result != wanted:
                self.fault(what, text, result=result, expected=wanted)

    def refused(self, what: str, text: Any, attempt: Callable[[], Any], *errors: type[Exception]) -> None:
        """Records a fault unless `attempt` raises one of the errors, with a message of one line."""
        try:
            result = attempt()
        except errors as error:
            if not str(error) or "\n" in str(error):
                self.fault(f"{what}: message", text, message=str(error))
        except Exception as error:
            self.fault(f"{what}: {type(error).__name__}", text, message=str(error))
        else:
            self.fault(f"{what}: not refused", text, result=result)


def jsonl(texts: Iterable[str]) -> Iterator[str]:
    """Yields an object per text, numbered by its target."""
    return (
        json.dumps({"source": text, "target": str(number)}, ensure_ascii=False) for number, text in enumerate(texts)
    )


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes lines that end in \\n and nothing else."""
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def read_file(cfg: Config, root: Path, name: str) -> Iterator[Example]:
    """Yields the examples of a file in the format that `cfg.data.source` names."""
    source = kinds.load(kinds.CORPORA, cfg.data.source)
    directions = read_directions(cfg.data, "test")
    reader: FileSource = source(cfg.data, root, task_of(cfg).keys, BadLines(), directions=directions)
    return reader.read_entry(name)


def read_lines(path: Path) -> list[str]:
    """Reads lines that end in \\n and nothing else."""
    return path.read_bytes().decode().split("\n")[:-1]


def as_words(text: str) -> list[str]:
    """Returns the words of a text: the commands write spaces for ends of lines."""
    return text.split()
