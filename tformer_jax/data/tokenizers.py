"""Between text and token ids. Ids 0 to 3 are the special tokens of `special_tokens.py` in every vocabulary."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers as hf

from tformer_jax.config import ConfigError, DataConfig
from tformer_jax.data.corpora.corpus import Corpus, Example
from tformer_jax.special_tokens import EOS, SPECIAL_TOKENS, UNK

FIRST = len(SPECIAL_TOKENS)
"""The id of the first ordinary token."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """V: ids are 0 ... V - 1."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first EOS; other special tokens are left out."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What `from_json` rebuilds the tokenizer from."""
        ...


class ByteTokenizer:
    """One token a UTF-8 byte; every text has a round trip."""

    vocab_size = FIRST + 256

    def encode(self, text: str) -> list[int]:
        """The bytes of the text, each moved up past the special tokens."""
        return [FIRST + byte for byte in text.encode("utf-8", "surrogatepass")]

    def decode(self, ids: Iterable[int]) -> str:
        """The inverse of `encode`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i - FIRST for i in ordinary(ids)).decode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        """Nothing but its kind."""
        return {"kind": "bytes"}


class CharacterTokenizer:
    """One token a character of the training text; other characters become UNK."""

    def __init__(self, characters: Sequence[str]):
        self.characters = list(characters)
        self._ids = {character: FIRST + number for number, character in enumerate(self.characters)}

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """Every character that occurs, in the order of their code points."""
        return cls(sorted(set().union(*texts)))

    @property
    def vocab_size(self) -> int:
        """Characters and special tokens."""
        return FIRST + len(self.characters)

    def encode(self, text: str) -> list[int]:
        """One id a character."""
        ids = self._ids
        return [ids.get(character, UNK) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """The characters side by side."""
        return "".join(self.characters[i - FIRST] for i in ordinary(ids) if i < self.vocab_size)

    def to_json(self) -> dict[str, Any]:
        """The characters in the order of their ids."""
        return {"kind": "characters", "characters": self.characters}


class SubwordTokenizer:
    """Byte-level BPE or Unigram by Hugging Face's `tokenizers`; every text has a round trip."""

    def __init__(self, kind: str, tokenizer: hf.Tokenizer):
        tokenizer.encode_special_tokens = True
        self.kind, self._tokenizer = kind, tokenizer
        self.vocab_size = tokenizer.get_vocab_size()

    @classmethod
    def train(cls, kind: str, texts: Iterable[str], vocab_size: int, *, split_digits: bool) -> "SubwordTokenizer":
        """Trains a vocabulary of at most `vocab_size` tokens, the 256 bytes and the special tokens among them.

        Raises:
            ConfigError: `vocab_size` has no room for the bytes.
        """
        alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < len(alphabet) + FIRST:
            raise ConfigError(
                f"data.vocab_size={vocab_size}: a byte-level vocabulary needs at least {len(alphabet) + FIRST}"
            )
        options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "special_tokens": list(SPECIAL_TOKENS),
            "initial_alphabet": alphabet,
            "show_progress": False,
        }
        if kind == "bpe":
            tokenizer = hf.Tokenizer(hf.models.BPE())
            trainer: hf.trainers.Trainer = hf.trainers.BpeTrainer(**options)
        else:
            tokenizer = hf.Tokenizer(hf.models.Unigram())
            trainer = hf.trainers.UnigramTrainer(unk_token=SPECIAL_TOKENS[UNK], **options)
        by_digit = [hf.pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
        by_word = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([*by_digit, by_word])
        tokenizer.decoder = hf.decoders.ByteLevel()
        tokenizer.train_from_iterator(texts, trainer)
        return cls(kind, tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of the subwords; text that looks like a special token is ordinary text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The subwords joined; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ordinary(ids)))

    def to_json(self) -> dict[str, Any]:
        """The library's own JSON below `model`."""
        return {"kind": self.kind, "model": json.loads(self._tokenizer.to_str())}


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of the source and that of the target; one and the same where the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer

    def save(self, folder: Path) -> None:
        """Writes `source.json` and `target.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("source", "target"):
            text = json.dumps(getattr(self, name).to_json(), ensure_ascii=False)
            (folder / f"{name}.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        """Reads what `save` wrote.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        return cls(*(_load(folder / f"{name}.json") for name in ("source", "target")))


def train_tokenizers(cfg: DataConfig, corpus: Corpus) -> Tokenizers:
    """Trains what `cfg.tokenizer` names on the training split, on at most `cfg.tokenizer_examples` examples."""
    count = min(len(corpus.train), cfg.tokenizer_examples)
    chosen = [corpus.train[i * len(corpus.train) // count] for i in range(count)]
    sides = [side for side in ("source", "target") if side in chosen[0]]
    if cfg.shared_vocab or not sides:
        shared = _train(cfg, _texts(chosen, sides or ["text"]))
        return Tokenizers(shared, shared)
    return Tokenizers(*(_train(cfg, _texts(chosen, [side])) for side in sides))


def ordinary(ids: Iterable[int]) -> Iterator[int]:
    """The ids before the first EOS that are no special tokens."""
    for i in ids:
        if i == EOS:
            return
        if i >= FIRST:
            yield int(i)


def from_json(values: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` described."""
    if values["kind"] == "bytes":
        return ByteTokenizer()
    if values["kind"] == "characters":
        return CharacterTokenizer(values["characters"])
    return SubwordTokenizer(values["kind"], hf.Tokenizer.from_str(json.dumps(values["model"])))


def _load(path: Path) -> Tokenizer:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: the run folder has lost its tokenizer") from None
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def _train(cfg: DataConfig, texts: Iterable[str]) -> Tokenizer:
    if cfg.tokenizer == "bytes":
        return ByteTokenizer()
    if cfg.tokenizer == "characters":
        return CharacterTokenizer.train(texts)
    return SubwordTokenizer.train(cfg.tokenizer, texts, cfg.vocab_size, split_digits=cfg.split_digits)


def _texts(examples: Sequence[Example], sides: Sequence[str]) -> Iterator[str]:
    for example in examples:
        for side in sides:
            yield example[side]
