"""Tokenizers in files: files of other libraries, and the pair of a run folder."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.config import kinds
from tformer_jax.config.kinds import Kinds
from tformer_jax.data.tokenizers.base import Tokenizer

FORMATS = Kinds(
    checkpoint="tformer_jax.data.tokenizers.huggingface:HFTokenizer",
    checkpoint_pieces="tformer_jax.data.tokenizers.sentencepiece:SentencePieceTokenizer",
    sentencepiece="tformer_jax.data.tokenizers.sentencepiece:SentencePieceTokenizer",
    tiktoken="tformer_jax.data.tokenizers.tiktoken:TiktokenTokenizer",
)
"""Classes by the `kind` of tokenizers that are only loaded; `kinds.TOKENIZERS` has the others."""
SUFFIXES = {".json": "checkpoint", ".model": "sentencepiece", ".tiktoken": "tiktoken"}


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """The parts of texts for which a model reads numbered symbols (`data.placeholders`); false if there are none."""

    names: tuple[str, ...] = ()
    """Keys of `data.placeholders.PATTERNS`."""
    symbols: tuple[str, ...] = ()
    """Symbols of the vocabulary, which are no placeholders, even if a pattern matches them."""

    def __bool__(self) -> bool:
        return bool(self.names)


NO_PLACEHOLDERS = Placeholders()


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The source and target tokenizers; the same object if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer

    @functools.cached_property
    def placeholders(self) -> Placeholders:
        """The placeholders of pairs; none if one side has no symbols for them."""
        names = self.source.placeholders if self.source.placeholders == self.target.placeholders else ()
        return Placeholders(names, tuple(dict.fromkeys((*self.source.symbols, *self.target.symbols))))

    def save(self, folder: Path) -> None:
        """Writes `source.json` and `target.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in self.to_json().items():
            (folder / f"{name}.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        """Loads the files that `save` writes.

        Raises:
            UserError: a file is missing or damaged.
        """
        return cls(*(_load_saved(folder / f"{name}.json") for name in ("source", "target")))

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON of both; equal JSON means equal tokenizers."""
        return {"source": self.source.to_json(), "target": self.target.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Tokenizers":
        """Restores the tokenizers from `to_json`."""
        source = from_json(values["source"])
        return cls(source, source if values["target"] == values["source"] else from_json(values["target"]))


def from_json(values: dict[str, Any]) -> Tokenizer:
    """Restores a tokenizer from its `to_json`.

    Raises:
        UserError: its kind is not registered.
    """
    if values["kind"] == "with_symbols":
        return from_json(values["tokenizer"]).with_symbols(values["symbols"], values["placeholders"])
    if values["kind"] == "normalized":
        return from_json(values["tokenizer"]).normalized(values["steps"], values["language"])
    if values["kind"] == "extended":
        return from_json(values["tokenizer"]).extended(values["added"])
    if values["kind"] == "with_chat":
        from tformer_jax.data.chat.template import ChatTemplate

        return from_json(values["tokenizer"]).with_chat(ChatTemplate.from_json(values["template"]), values["eos"])
    restored: Tokenizer = find_class(values["kind"]).from_json(values)
    restored.kind = values["kind"]
    return restored


def find_class(kind: str) -> type[Tokenizer]:
    """Returns the class of a kind of tokenizer.

    Raises:
        UserError: the kind is not registered.
    """
    names = FORMATS if kind in FORMATS else kinds.TOKENIZERS
    if kind not in names:
        raise UserError(f"the kind of tokenizer {kind!r} is not known; --import MODULE registers others")
    return kinds.load(names, kind)


def load_tokenizer(path: Path, setting: str = "data.tokenizer_file") -> Tokenizer:
    """Loads a tokenizer from a `.json`, `.model` or `.tiktoken` file, or one of a run (`tokenizers/target.json`).

    Args:
        setting: the name of the setting or flag that names the file, for messages.

    Raises:
        UserError: the file is missing, damaged or of another format, or its library is not installed.
    """
    if is_saved(path):
        return _load_saved(path)
    if not path.is_file():
        raise UserError(f"{setting}: {path} does not exist")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{setting}: {path} must end in {' or '.join(SUFFIXES)}")
    try:
        return find_class(SUFFIXES[path.suffix]).from_file(path)
    except UserError:
        raise
    except Exception as error:  # the libraries raise their own types, including bare Exception
        raise UserError(f"{setting}: {path} is not a valid {path.suffix} tokenizer ({first_line(error)})") from error


def is_saved(path: Path) -> bool:
    """Returns whether a file is the tokenizer of a run, rather than one of another library."""
    return path.is_file() and path.read_bytes().startswith(b'{"kind"')


def _load_saved(path: Path) -> Tokenizer:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the run folder has lost its tokenizer") from None
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception for JSON that is not a tokenizer
        raise UserError(f"{path} is damaged: {error}") from None
