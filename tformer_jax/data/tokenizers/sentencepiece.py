"""Tokenizers of the `sentencepiece` library: a model's own ids, or a checkpoint's ids with its added tokens."""

import base64
import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import tokenizers as hf

from tformer_jax.base.checks import import_extra
from tformer_jax.base.json_files import Settings, read_json
from tformer_jax.data.tokenizers.base import FIRST, SENTINEL, UNKNOWN_MARK, Tokenizer, special_from_json, with_context
from tformer_jax.data.tokenizers.classes import special_names
from tformer_jax.data.tokenizers.notation import SPACED
from tformer_jax.special_tokens import UNK, SpecialTokens

Fields = dict[str, Any]
"""A token as in `added_tokens_decoder` of tokenizer_config.json: its name is `content`."""
LANGUAGE_CODE = re.compile(">>.*?<<", re.DOTALL)
NO_SPACE = "\ue000"
"""A character that no model has: SentencePiece puts the space before it instead of before the text after it."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Without `special`, ids are shifted past this package's special tokens, and the unknown piece becomes UNK. With it,
    texts are read as transformers does: with the ids of a checkpoint's vocabulary, and names of special tokens as these
    tokens.

    Args:
        model: the file.
        special: the special tokens of a checkpoint; None: this package's.
        vocab: ids by piece; None: the model's ids.
        added: added tokens by id.
        spaced: a text after an added token is encoded as if a space were before it, like a whole text that has none.
        codes: a language code at the beginning of a text, such as `>>fr<<`, is one piece if there is a vocabulary, as
            for Marian's multilingual models.
    """

    def __init__(
        self,
        model: bytes,
        special: SpecialTokens | None = None,
        vocab: dict[str, int] | None = None,
        added: Mapping[int, Fields] = MappingProxyType({}),
        *,
        spaced: bool = True,
        codes: bool = True,
    ):
        self.kind = "sentencepiece" if special is None else "checkpoint_pieces"
        self._processor = load_model(model)
        pieces = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
        shift = FIRST if special is None else 0
        self.model, self.vocab, self.added, self.spaced = model, vocab, AddedTokens(added), spaced
        self.codes = codes
        self._ids = vocab or {piece: shift + i for i, piece in enumerate(pieces)}
        self._pieces = {i: piece for piece, i in self._ids.items()}
        self._pieces |= {i: fields["content"] for i, fields in added.items()}
        self.vocab_size = max(self._pieces) + 1
        single_bytes = (piece for i, piece in enumerate(pieces) if self._processor.is_byte(i))
        self.fallback_bytes = frozenset(self._ids[piece] for piece in single_bytes if piece in self._ids)
        self.special = special or with_context(self)

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        if self.keeps_ids:
            return list(map(self._encode, texts))
        unknown, encode = self._processor.unk_id(), self._processor.encode
        return [[UNK if i == unknown else FIRST + i for i in encode(text)] for text in texts]

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        shown = self.unknown_ids if unknown else ()
        pieces = [UNKNOWN_MARK if i in shown else self._pieces[i] for i in ids if i in self._pieces or i in shown]
        text: str = self._processor.decode_pieces(pieces)
        text = text.replace(UNKNOWN_MARK, unknown) if unknown else text
        return text if self.vocab is None else text.replace("▁", " ").strip()

    def without_special_names(self) -> Tokenizer:
        changed = copy.copy(self)
        changed.added = AddedTokens({i: fields for i, fields in self.added.tokens.items() if not fields["special"]})
        return changed if self.keeps_ids else self

    def without_added(self, size: int) -> Tokenizer:
        if self.keeps_ids and self.is_plain:
            added = {i: fields for i, fields in self.added.tokens.items() if i < size or not fields["special"]}
            options = {"spaced": self.spaced, "codes": self.codes}
            limited = SentencePieceTokenizer(self.model, self.special.below(size), self.vocab, added, **options)
            limited.chat = self.chat
            return limited
        return self

    @property
    def keeps_ids(self) -> bool:
        """Whether ids are a checkpoint's."""
        return self.kind == "checkpoint_pieces"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        model = base64.b64decode(values["model"])
        if "special" not in values:
            return cls(model)
        added = {int(i): fields for i, fields in values.get("added", {}).items()}
        special = special_from_json(values["special"])
        options = {name: values.get(name, True) for name in ("spaced", "codes")}
        return cls(model, special, values["vocab"], added, **options)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        return cls(path.read_bytes())

    def describe(self) -> dict[str, Any]:
        """Returns the model file in base 64, and for a checkpoint the arguments of the tokenizer."""
        model = {"model": base64.b64encode(self.model).decode()}
        if not self.keeps_ids:
            return model
        return model | {
            "vocab": self.vocab,
            "special": dataclasses.asdict(self.own_special),
            "added": {str(i): fields for i, fields in self.added.tokens.items()},
            "spaced": self.spaced,
            "codes": self.codes,
        }

    def vocabulary(self) -> tuple[str, dict[str, int]]:
        return SPACED, self._ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self.added.split(text)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_part(part, spaced=(number == 0 or self.spaced) and not part.startswith(" "))
        return ids

    def _encode_part(self, text: str, *, spaced: bool) -> list[int]:
        """Encodes a text without added tokens; `spaced`: with the space that SentencePiece puts before texts."""
        match = LANGUAGE_CODE.match(text) if self.codes and self.vocab is not None else None
        code, text = ([match[0]], text[match.end() :]) if match else ([], text)
        before = "" if spaced else NO_SPACE
        pieces = self.split_pieces(before + text)[len(self.split_pieces(before)) :]
        unknown = self.special.unknown
        assert unknown is not None
        return [self._ids.get(piece, unknown) for piece in (*code, *pieces)]

    def split_pieces(self, text: str) -> list[str]:
        """Splits a normalized text into pieces, whether the vocabulary has ids for them or not."""
        return self._processor.encode(text, out_type=str)


class AddedTokens:
    """Splits texts at names of tokens, with the rules of transformers about spaces around them."""

    def __init__(self, tokens: Mapping[int, Fields]):
        self.tokens = dict(tokens)
        self._library = hf.Tokenizer(hf.models.WordLevel({"": 0}, unk_token=""))
        self._library.add_tokens([hf.AddedToken(**fields) for fields in self.tokens.values()])
        self._ids = {self._library.token_to_id(fields["content"]): i for i, fields in self.tokens.items()}

    def split(self, text: str) -> list[int | str]:
        """Returns the ids of the tokens in a text, and the texts between them."""
        if not self.tokens:
            return [text]
        encoding = self._library.encode(text)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [self._ids.get(number, text[slice(*place)]) for number, place in places]


def load_model(model: bytes) -> Any:
    """Returns the library's processor of a model file."""
    return import_extra("this tokenizer", "sentencepiece", "tokenizers").SentencePieceProcessor(model_proto=model)


def parse_model(model: bytes) -> Any:
    """Returns the message of a model file, whose pieces can be read and changed."""
    library = import_extra("this tokenizer", "sentencepiece.sentencepiece_model_pb2", "tokenizers")
    return library.ModelProto.FromString(model)


def own_tokens(model: Any, sentinels: int) -> dict[int, Fields]:
    """Returns the special pieces of a SentencePiece model by id, and T5's sentinels, of which the first is the last."""
    size = model.get_piece_size()
    own = (i for i in range(size) if model.is_control(i) or model.is_unknown(i))
    tokens = {i: special_token(model.id_to_piece(i)) for i in own}
    return tokens | {size + sentinels - 1 - i: special_token(SENTINEL.format(i)) for i in range(sentinels)}


def read_added(folder: Path, options: Settings, own: Mapping[int, Fields], ids: Mapping[str, int]) -> dict[int, Fields]:
    """Returns the added tokens by id; transformers before 4.34 listed them in files besides tokenizer_config.json.

    Args:
        options: settings of tokenizer_config.json. A piece with the name of a special token becomes special, and other
            missing names are appended.
        own: tokens that no file needs to list.
        ids: ids of the vocabulary by piece.
    """
    if "added_tokens_decoder" in options:
        names = special_names(options)
        declared = {int(i): fields for i, fields in options["added_tokens_decoder"].items()}
    else:
        names = special_names(options | read_json(folder / "special_tokens_map.json", {}))
        listed = read_json(folder / "added_tokens.json", {})
        declared = {i: special_token(name, special=name in names) for name, i in listed.items()}
    added = dict(own)
    for i, fields in declared.items():
        added[i] = fields | {"special": fields.get("special", False) or fields["content"] in names}
    present = {fields["content"] for fields in added.values()}
    for name in names:
        if name not in present:
            added[ids.get(name, max((*ids.values(), *added)) + 1)] = special_token(name)
    return added


def special_token(name: str, *, special: bool = True) -> Fields:
    """Returns the fields of a token without rules about spaces around it."""
    return {"content": name, "normalized": not special, "special": special}
