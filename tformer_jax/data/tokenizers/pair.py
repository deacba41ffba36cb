"""The two tokenizers of an experiment, and the files they are kept in."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.imported import SentencePieceTokenizer, TiktokenTokenizer
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer

KINDS: dict[str, Any] = {
    "bytes": ByteTokenizer,
    "characters": CharacterTokenizer,
    "words": WordTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "tiktoken": TiktokenTokenizer,
}
"""Classes by the `kind` of their JSON; any other kind is a `SubwordTokenizer`."""


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of the source and that of the target; one and the same where the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer

    def save(self, folder: Path) -> None:
        """Writes `source.json` and `target.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in self.to_json().items():
            (folder / f"{name}.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        """Reads what `save` wrote.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        return cls(*(_load(folder / f"{name}.json") for name in ("source", "target")))

    def to_json(self) -> dict[str, Any]:
        """Both descriptions; equal ones turn every text into the same ids."""
        return {"source": self.source.to_json(), "target": self.target.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Tokenizers":
        """The tokenizers that `to_json` described."""
        return cls(from_json(values["source"]), from_json(values["target"]))


def from_json(values: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` described."""
    found: Tokenizer = KINDS.get(values["kind"], SubwordTokenizer).from_json(values)
    return found


def _load(path: Path) -> Tokenizer:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: the run folder has lost its tokenizer") from None
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception for JSON that is no tokenizer
        raise ConfigError(f"{path} is damaged: {error}") from None
