"""Tokenizers in files: tiktoken ranks, `tokenizer.json` and SentencePiece models, and the pair of a run folder."""

import base64
import binascii
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers as hf

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.packages import import_extra
from tformer_jax.config import kinds
from tformer_jax.data.chat.template import ChatTemplate
from tformer_jax.data.tokenizers.base import FIRST, Tokenizer
from tformer_jax.data.tokenizers.huggingface import CHECKPOINT, HFTokenizer
from tformer_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer
from tformer_jax.special_tokens import UNK

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""GPT-2's pre-tokenization pattern ("Language Models are Unsupervised Multitask Learners", 2019, section 2.2)."""


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE of the `tiktoken` library with GPT-2's pre-tokenization; ids are shifted past the special tokens.

    Ranks that the file leaves out add no text.
    """

    kind = "tiktoken"

    def __init__(self, ranks: dict[bytes, int]):
        library = import_extra("this tokenizer", "tiktoken", "tokenizers")
        self._ranks = ranks
        self._encoding = library.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._tokens = {FIRST + rank: token for token, rank in ranks.items()}
        self.vocab_size = max(self._tokens) + 1

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        return [[FIRST + i for i in self._encoding.encode_ordinary(text)] for text in texts]

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        pieces = (unknown.encode() if i == UNK else self._tokens.get(i, b"") for i in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls({base64.b64decode(token): rank for token, rank in values["ranks"].items()})

    def describe(self) -> dict[str, Any]:
        """Returns the ranks by token in base 64."""
        return {"ranks": {base64.b64encode(token).decode(): rank for token, rank in self._ranks.items()}}


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The source and target tokenizers; the same object if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the patterns of placeholders, for which symbols stand in pairs; () if one side has no symbols."""
        return self.source.placeholders if self.source.placeholders == self.target.placeholders else ()

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
        return cls(from_json(values["source"]), from_json(values["target"]))


FORMATS: dict[str, type[Tokenizer]] = {
    CHECKPOINT: HFTokenizer,
    "checkpoint_pieces": SentencePieceTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "tiktoken": TiktokenTokenizer,
}
"""Classes by the `kind` of tokenizers that are only loaded; `kinds.TOKENIZERS` has the others."""


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
        return from_json(values["tokenizer"]).with_chat(ChatTemplate.from_json(values["template"]), values["eos"])
    restored: Tokenizer = find_class(values["kind"]).from_json(values)
    restored.kind = values["kind"]
    return restored


def find_class(kind: str) -> type[Tokenizer]:
    """Returns the class of a kind of tokenizer.

    Raises:
        UserError: the kind is not registered.
    """
    if kind in FORMATS:
        return FORMATS[kind]
    if kind not in kinds.TOKENIZERS:
        raise UserError(f"the kind of tokenizer {kind!r} is not known; --import MODULE registers others")
    registered: type[Tokenizer] = kinds.load(kinds.TOKENIZERS, kind)
    return registered


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
    if path.suffix not in LOADERS:
        raise UserError(f"{setting}: {path} must end in {' or '.join(LOADERS)}")
    try:
        return LOADERS[path.suffix](path)
    except UserError:
        raise
    except Exception as error:  # the libraries raise their own types, including bare Exception
        reason = first_line(error)
        raise UserError(f"{setting}: {path} is not a valid {path.suffix} tokenizer ({reason})") from error


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


def _load_ranks(path: Path) -> TiktokenTokenizer:
    ranks = {}
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(f"data.tokenizer_file: {path}, line {number}: must be base64<space>rank") from error
    return TiktokenTokenizer(ranks)


LOADERS: dict[str, Callable[[Path], Tokenizer]] = {
    ".json": lambda path: HFTokenizer(hf.Tokenizer.from_file(str(path))),
    ".model": lambda path: SentencePieceTokenizer(path.read_bytes()),
    ".tiktoken": _load_ranks,
}
