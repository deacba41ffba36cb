"""The source and target tokenizers of an experiment, and their files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.extended import ExtendedTokenizer, unextended
from tformer_jax.data.tokenizers.from_files import SentencePieceTokenizer, TiktokenTokenizer, load_tokenizer
from tformer_jax.data.tokenizers.normalization import NormalizedTokenizer
from tformer_jax.data.tokenizers.pretrained import CheckpointTokenizer, PiecesTokenizer
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer

KINDS: dict[str, Any] = {
    "bytes": ByteTokenizer,
    "characters": CharacterTokenizer,
    "words": WordTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "tiktoken": TiktokenTokenizer,
    CheckpointTokenizer.kind: CheckpointTokenizer,
    PiecesTokenizer.kind: PiecesTokenizer,
}
"""Classes by the `kind` in their JSON; other kinds are `SubwordTokenizer`."""


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The source and target tokenizers; the same object if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer

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
        return cls(*(_load(folder / f"{name}.json") for name in ("source", "target")))

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON of both; equal JSON means equal tokenizers."""
        return {"source": self.source.to_json(), "target": self.target.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Tokenizers":
        """Restores the tokenizers from `to_json`."""
        return cls(from_json(values["source"]), from_json(values["target"]))


def from_json(values: dict[str, Any]) -> Tokenizer:
    """Restores a tokenizer from its `to_json`."""
    if values["kind"] == NormalizedTokenizer.kind:
        return NormalizedTokenizer(from_json(values["tokenizer"]), values["steps"], values["language"])
    if values["kind"] == ExtendedTokenizer.kind:
        return ExtendedTokenizer(from_json(values["tokenizer"]), values["added"])
    tokenizer: Tokenizer = KINDS.get(values["kind"], SubwordTokenizer).from_json(values)
    return tokenizer


def normalization_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the steps by which a tokenizer normalizes texts, in order."""
    inner = unextended(tokenizer)
    return inner.steps if isinstance(inner, NormalizedTokenizer) else ()


def load_file(path: Path) -> Tokenizer:
    """Loads a tokenizer of a run folder (`tokenizers/target.json`), or a file that `load_tokenizer` reads.

    Raises:
        UserError: the file is missing or damaged.
    """
    return _load(path) if is_saved(path) else load_tokenizer(path)


def is_saved(path: Path) -> bool:
    """Returns whether a file is the tokenizer of a run, rather than one of another library."""
    return path.is_file() and path.read_bytes().startswith(b'{"kind"')


def _load(path: Path) -> Tokenizer:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the run folder has lost its tokenizer") from None
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception for JSON that is not a tokenizer
        raise UserError(f"{path} is damaged: {error}") from None
