"""Tokenizers of published checkpoints, with their own ids and special tokens, as transformers reads them."""

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tokenizers as hf

from tformer_jax.data.tokenizers.added import AddedTokens, Fields
from tformer_jax.data.tokenizers.base import UNKNOWN_MARK, OneByOne, decode_tokens, import_library
from tformer_jax.special_tokens import SpecialTokens

NO_SPACE = "\ue000"
"""A character that no model has: SentencePiece puts the space before it instead of before the text after it."""


class _Pretrained:
    """Base class: decoding stops at the first EOS token and omits special tokens."""

    special: SpecialTokens
    vocab_size: int
    fallback_bytes: frozenset[int]

    def _ordinary(self, ids: Iterable[int], *, unknown: bool = False) -> list[int]:
        """Returns the ids before the first EOS token, without special tokens; `unknown`: with the unknown token."""
        hidden, eos = self.special.name_of, self.special.eos
        shown = self.special.shown_unknown if unknown else None
        kept = itertools.takewhile(lambda i: i not in eos, ids)
        return [int(i) for i in kept if (i not in hidden or i == shown) and i < self.vocab_size]


class CheckpointTokenizer(_Pretrained):
    """A `tokenizer.json`; names of special tokens in a text are read as these tokens, as transformers does.

    Args:
        split_special_tokens: names of special tokens are split like other texts, as with this option of transformers.
    """

    kind = "checkpoint"

    def __init__(self, tokenizer: hf.Tokenizer, special: SpecialTokens, *, split_special_tokens: bool = False):
        self._tokenizer, self.special, self.split_special_tokens = tokenizer, special, split_special_tokens
        tokenizer.encode_special_tokens = split_special_tokens
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        byte_ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.fallback_bytes = frozenset(i for i in byte_ids if i is not None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = self.split_special_tokens  # the library does not pickle it

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without the special tokens around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text, in parallel."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes ids; invalid UTF-8 becomes U+FFFD."""
        kept, shown = self._ordinary(ids, unknown=bool(unknown)), self.special.shown_unknown
        if not unknown or shown not in kept:
            return self._tokenizer.decode(kept)
        names = (UNKNOWN_MARK if i == shown else self._tokenizer.id_to_token(i) for i in kept)
        text = decode_tokens(self._tokenizer, [name for name in names if name is not None])
        return text.replace(UNKNOWN_MARK, unknown)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decodes each row of ids as `decode` does, in parallel."""
        return self._tokenizer.decode_batch([self._ordinary(ids) for ids in rows])

    def without_added(self, size: int) -> "CheckpointTokenizer":
        """Returns the tokenizer without the added special tokens whose ids are `size` or more."""
        model = json.loads(self._tokenizer.to_str())
        model["added_tokens"] = [token for token in model["added_tokens"] if token["id"] < size or not token["special"]]
        library = hf.Tokenizer.from_str(json.dumps(model))
        split = self.split_special_tokens
        return CheckpointTokenizer(library, self.special.below(size), split_special_tokens=split)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CheckpointTokenizer":
        """Restores the tokenizer from `to_json`."""
        library = hf.Tokenizer.from_str(json.dumps(values["model"]))
        split = bool(values.get("split_special_tokens"))
        return cls(library, special_from_json(values["special"]), split_special_tokens=split)

    def to_json(self) -> dict[str, Any]:
        """Returns the kind, the `tokenizer.json` under `model`, and the special tokens."""
        model = json.loads(self._tokenizer.to_str())
        split = {"split_special_tokens": True} if self.split_special_tokens else {}
        return {"kind": self.kind, "model": model, "special": dataclasses.asdict(self.special), **split}


class PiecesTokenizer(_Pretrained, OneByOne):
    """A SentencePiece model, whose pieces have the ids of a vocabulary, or the model's own.

    A language code at the beginning of a text, such as `>>fr<<`, is one piece, as for Marian's multilingual models.

    Args:
        model: the file.
        vocab: ids by piece; None: those of the model.
        added: added tokens by id; names of special ones in a text are read as these tokens, as transformers does.
        spaced: a text after an added token is encoded as if a space were before it, like a whole text.
    """

    kind = "checkpoint_pieces"

    def __init__(
        self,
        model: bytes,
        vocab: dict[str, int] | None,
        special: SpecialTokens,
        added: Mapping[int, Fields] = MappingProxyType({}),
        *,
        spaced: bool = True,
    ):
        self._processor = import_library("sentencepiece").SentencePieceProcessor(model_proto=model)
        size = self._processor.get_piece_size()
        self.model, self.vocab, self.added, self.spaced = model, vocab, AddedTokens(added), spaced
        self._ids = vocab or {self._processor.id_to_piece(i): i for i in range(size)}
        self._pieces = {i: piece for piece, i in self._ids.items()}
        self._pieces |= {i: fields["content"] for i, fields in added.items()}
        self.special, self.vocab_size = special, max(self._pieces) + 1
        single_bytes = (self._processor.id_to_piece(i) for i in range(size) if self._processor.is_byte(i))
        self.fallback_bytes = frozenset(self._ids[piece] for piece in single_bytes if piece in self._ids)

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without the special tokens around it."""
        ids: list[int] = []
        for number, part in enumerate(self.added.split(text)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_part(part, spaced=number == 0 or (self.spaced and not part.startswith(" ")))
        return ids

    def _encode_part(self, text: str, *, spaced: bool) -> list[int]:
        """Encodes a text without added tokens; `spaced`: with the space that SentencePiece puts before texts."""
        code, text = ([], text) if self.vocab is None else _language_code(text)
        pieces = self._split(text) if spaced else self._split(NO_SPACE + text)[len(self._split(NO_SPACE)) :]
        unknown = self.special.unknown
        assert unknown is not None
        return [self._ids.get(piece, unknown) for piece in (*code, *pieces)]

    def _split(self, text: str) -> list[str]:
        pieces: list[str] = self._processor.encode(text, out_type=str)
        return pieces

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes ids with the SentencePiece model."""
        shown = self.special.shown_unknown if unknown else None
        kept = [i for i in self._ordinary(ids, unknown=bool(unknown)) if i in self._pieces]
        pieces = [UNKNOWN_MARK if i == shown else self._pieces[i] for i in kept]
        text: str = self._processor.decode_pieces(pieces)
        text = text.replace(UNKNOWN_MARK, unknown) if unknown else text
        return text if self.vocab is None else text.replace("▁", " ").strip()

    def without_added(self, size: int) -> "PiecesTokenizer":
        """Returns the tokenizer without the added special tokens whose ids are `size` or more."""
        added = {i: fields for i, fields in self.added.tokens.items() if i < size or not fields["special"]}
        return PiecesTokenizer(self.model, self.vocab, self.special.below(size), added, spaced=self.spaced)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PiecesTokenizer":
        """Restores the tokenizer from `to_json`."""
        added = {int(i): fields for i, fields in values.get("added", {}).items()}
        model, special = base64.b64decode(values["model"]), special_from_json(values["special"])
        return cls(model, values["vocab"], special, added, spaced=values.get("spaced", True))

    def to_json(self) -> dict[str, Any]:
        """Returns the kind, the model file in base 64, the vocabulary, the special tokens and the added ones."""
        model, special = base64.b64encode(self.model).decode(), dataclasses.asdict(self.special)
        added = {str(i): fields for i, fields in self.added.tokens.items()}
        return {
            "kind": self.kind,
            "model": model,
            "vocab": self.vocab,
            "special": special,
            "added": added,
            "spaced": self.spaced,
        }


def special_from_json(values: dict[str, Any]) -> SpecialTokens:
    """Restores special tokens from their fields, whose tuples JSON writes as lists."""
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list | tuple)}
    return SpecialTokens(**{**values, **lists, "names": tuple((i, name) for i, name in values["names"])})


def _language_code(text: str) -> tuple[list[str], str]:
    end = text.find("<<")
    if not text.startswith(">>") or end < 0:
        return [], text
    return [text[: end + 2]], text[end + 2 :]
