"""The tokenizer interface: what each kind implements, and what all share."""

import copy
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import tokenizers as hf

from tformer_jax.config import DataConfig
from tformer_jax.config.examples import SENTINELS
from tformer_jax.data.tokenizers.normalization import ids_of_symbols, normalizer, symbol_pattern
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS, SPECIAL_TOKENS, SpecialTokens

if TYPE_CHECKING:
    from tformer_jax.data.chat.template import ChatTemplate

FIRST = len(SPECIAL_TOKENS)
"""Id of the first token that is not special in this package's tokenizers."""
UNKNOWN_MARK = "\ufdd0"
"""A noncharacter of Unicode, which marks the place of an unknown token in a text while it is decoded."""
MASK = "<mask>"
TAG = "<2{}>"
"""Names of the tags of languages, by code ("Google's Multilingual Neural Machine Translation System", 2017)."""
SENTINEL = "<extra_id_{}>"
"""Names of T5's sentinels, by number."""
SENTINEL_TOKENS = tuple(map(SENTINEL.format, range(SENTINELS)))
SYNONYMS = {MASK: "[MASK]"}
"""Other names of these tokens in published vocabularies."""

_cached_normalizer = functools.cache(normalizer)


class Decoder(Protocol):
    """Converts token ids to text."""

    @property
    def special(self) -> SpecialTokens:
        """The special tokens."""

    @property
    def fallback_bytes(self) -> frozenset[int]:
        """Ids of byte-fallback tokens: single bytes; successive ones are decoded together."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids before the first EOS token, skipping other special tokens."""


class Tokenizer:
    """Converts text to token ids and back.

    A kind sets `vocab_size`, and the other attributes where they differ. It implements `encode_normalized`,
    `decode_ordinary`, `describe` and `from_json`, and also `train` if it is a value of `data.tokenizer`.
    """

    kind: str = ""
    """The name in `kinds.TOKENIZERS`, or of a format of files."""
    settings: ClassVar[tuple[str, ...]] = ("vocab_size", "tokenizer_examples")
    """The settings of `data` with `used_by="tokenizer"` that training uses."""
    separator: ClassVar[str] = ""
    """What decoding writes between words, if spaces are no part of tokens."""
    is_bpe: ClassVar[bool] = False
    """Whether `BpeDropout` can segment texts."""
    vocab_size: int
    """Vocabulary size V: ids are in [0, V)."""
    special: SpecialTokens = DEFAULT_SPECIAL_TOKENS
    """The special tokens, including `extension`."""
    fallback_bytes: frozenset[int] = frozenset()
    """Ids of byte-fallback tokens: single bytes; successive ones are decoded together."""
    symbols: tuple[str, ...] = ()
    """Texts that are one token each wherever they stand; `with_symbols` appended them to the vocabulary."""
    placeholders: tuple[str, ...] = ()
    """Names of the patterns whose matches are replaced by symbols before a text is encoded (`data.placeholders`)."""
    steps: tuple[str, ...] = ()
    """Steps that normalize each text before it is encoded, in order."""
    language: str = ""
    """Code of the language whose rules the steps apply."""
    extension: tuple[str, ...] = ()
    """Names of the special tokens that `extended` appended to the vocabulary; texts never have them."""
    chat: "ChatTemplate | None" = None
    """What writes conversations as texts."""

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> "Tokenizer":
        """Trains a tokenizer on normalized texts.

        Args:
            texts: texts of at most `cfg.tokenizer_examples` examples.
            all_texts: texts of all examples, for a vocabulary with each of their characters. Like `texts`, it can be
                iterated once, and is read only then.

        Raises:
            UserError: `cfg.vocab_size` is too small.
        """
        raise NotImplementedError

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text, which is normalized."""
        raise NotImplementedError

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        """Decodes ids without special tokens; if `unknown` is not empty, it is the text of `unknown_ids`."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Returns the JSON from which `from_json` restores the tokenizer, without symbols, normalization, extension."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Tokenizer":
        """Restores a tokenizer from its description, to which `kind` is added."""
        raise NotImplementedError

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Reads a file of the library, for a kind in `files.SUFFIXES`."""
        raise NotImplementedError

    @property
    def is_plain(self) -> bool:
        """Whether texts are encoded as they are, and the vocabulary is not extended."""
        return not (self.symbols or self.steps or self.extension)

    @property
    def own_size(self) -> int:
        """Vocabulary size without `symbols`, which follow it, and `extension`."""
        return self.vocab_size - len(self.symbols) - len(self.extension)

    @property
    def symbol_ids(self) -> Mapping[str, int]:
        """Ids by symbol."""
        return ids_of_symbols(self.symbols, self.own_size)

    @property
    def own_special(self) -> SpecialTokens:
        """The special tokens without `extension`."""
        size, names = self.own_size, self.special.names
        suppressed = tuple(i for i in self.special.suppressed if i < size)
        return dataclasses.replace(self.special, names=names[: len(names) - len(self.extension)], suppressed=suppressed)

    @property
    def mask(self) -> tuple[int, str] | None:
        """The id and the name of the mask token; None: there is none."""
        ids = {name: i for i, name in self.special.names}
        return next(((ids[name], name) for name in (MASK, SYNONYMS[MASK]) if name in ids), None)

    @property
    def unknown_ids(self) -> set[int]:
        """Tokens that stand for text outside the vocabulary, and nothing else."""
        unknown = self.special.shown_unknown
        return set() if unknown is None else {unknown}

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without the special tokens around it.

        Names of special tokens are encoded as ordinary text, except by tokenizers of checkpoints, which read them.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text as `encode` does."""
        return self.encode_with_symbols(list(map(self.normalize, texts)) if self.steps else texts)

    def encode_with_symbols(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text, which is normalized: symbols as one token each, and the texts between them."""
        if not self.symbols:
            return self.encode_normalized(texts)
        rows = [self.split_symbols(text) for text in texts]
        encoded = iter(self.encode_normalized([part for row in rows for part in row if isinstance(part, str)]))
        return [[i for part in row for i in (next(encoded) if isinstance(part, str) else [part])] for row in rows]

    def split_symbols(self, text: str) -> list[str | int]:
        """Returns the ids of the symbols in a normalized text, and the texts between them that are not empty."""
        ids = self.symbol_ids
        parts = symbol_pattern(self.symbols).split(text) if ids else [text]
        return [ids.get(part, part) for part in parts if part]

    def normalize(self, text: str) -> str:
        """Applies the steps of normalization to a text."""
        return _cached_normalizer(self.steps, self.language, self.symbols)(text)

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes the ids before the first EOS token, skipping other special tokens and ids outside the vocabulary.

        Invalid UTF-8 becomes U+FFFD. Symbols are written as words, with spaces around them, if encoding loses the
        spaces at the ends of a text.

        Args:
            unknown: text of an unknown token; empty: omit it.
        """
        hidden, eos, shown = self.special.name_of, self.special.eos, self.unknown_ids if unknown else ()
        size, ordinary, texts = self.own_size, [], []
        for i in ids:
            if i in eos:
                break
            if 0 <= i < size and (i not in hidden or i in shown):
                ordinary.append(int(i))
            elif 0 <= i - size < len(self.symbols):
                texts += [self.decode_ordinary(ordinary, unknown), self.symbols[i - size]]
                ordinary = []
        texts.append(self.decode_ordinary(ordinary, unknown))
        written = texts[0]
        for text in filter(None, texts[1:]):
            apart = not written or written[-1].isspace() or text[0].isspace()
            written += text if apart else self._symbol_separator + text
        return written

    @functools.cached_property
    def _symbol_separator(self) -> str:
        """What decoding writes between a symbol and a text: a space if the first token of each text has one."""
        twice = self.decode_ordinary(2 * self.encode_normalized(["a"])[0], "")
        return self.separator or (" " if " " in twice else "")

    def with_symbols(self, symbols: Sequence[str], placeholders: Sequence[str] = ()) -> Self:
        """Returns a copy with symbols, for which the vocabulary is extended, and the names of placeholders."""
        assert not (self.symbols or self.extension)
        changed = self._enlarged(len(symbols))
        changed.symbols, changed.placeholders = tuple(symbols), tuple(placeholders)
        return changed

    def normalized(self, steps: Sequence[str], language: str) -> Self:
        """Returns a copy that normalizes texts by `steps`; arguments and exceptions are as for `normalizer`."""
        changed = copy.copy(self)
        changed.steps, changed.language = tuple(steps), language
        _cached_normalizer(changed.steps, language)
        return changed

    def extended(self, names: Sequence[str]) -> Self:
        """Returns a copy with special tokens appended to the vocabulary; skips names that it already has.

        Tags of languages are never generated.
        """
        present = {name for _, name in self.special.names}
        missing = [name for name in names if not present & {name, SYNONYMS.get(name)}]
        new = tuple(enumerate(missing, self.vocab_size))
        tags = tuple(i for i, name in new if name.startswith(TAG[:2]))
        changed = self._enlarged(len(missing))
        changed.extension, special = (*self.extension, *missing), changed.special
        suppressed = (*special.suppressed, *tags)
        changed.special = dataclasses.replace(special, names=(*special.names, *new), suppressed=suppressed)
        return changed

    def _enlarged(self, count: int) -> Self:
        """Returns a copy with `count` more ids.

        Special tokens outside of the vocabulary, such as an end that no output has, stay outside.
        """
        changed, first = copy.copy(self), self.vocab_size
        changed.vocab_size = last = first + count
        changed.special = self.special.renumbered(lambda i: i + count if first <= i < last else i)
        return changed

    def with_chat(self, template: "ChatTemplate", eos: Sequence[int] = ()) -> Self:
        """Returns a copy with a template of conversations, whose outputs end with `eos` if it is not empty."""
        changed = copy.copy(self)
        changed.chat = template
        changed.special = dataclasses.replace(self.special, eos=tuple(eos) or self.special.eos)
        return changed

    def without_special_names(self) -> "Tokenizer":
        """Returns a tokenizer for which names of special tokens are ordinary text; itself if they are already."""
        return self

    def without_added(self, size: int) -> "Tokenizer":
        """Returns a checkpoint's tokenizer without the added special tokens whose ids are `size` or more."""
        return self

    def id_of(self, name: str) -> int:
        """Returns the id of a special token that `extended` was given."""
        ids = {other: i for i, other in self.special.names}
        return ids[name] if name in ids else ids[SYNONYMS[name]]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON from which `tokenizers.from_json` restores the tokenizer."""
        values: dict[str, Any] = {"kind": self.kind, **self.describe()}
        if self.symbols:
            added = {"symbols": list(self.symbols), "placeholders": list(self.placeholders)}
            values = {"kind": "with_symbols", **added, "tokenizer": values}
        if self.steps:
            values = {"kind": "normalized", "steps": list(self.steps), "language": self.language, "tokenizer": values}
        if self.extension:
            values = {"kind": "extended", "added": list(self.extension), "tokenizer": values}
        if self.chat is not None:
            template = dataclasses.asdict(self.chat)
            values = {"kind": "with_chat", "template": template, "eos": list(self.special.eos), "tokenizer": values}
        return values

    def to_library(self) -> hf.Tokenizer | None:
        """Returns a tokenizer of the `tokenizers` library with the same ids and decoded texts; None: there is none.

        It is without symbols, the normalization and the extension.
        """
        return None

    def vocabulary(self) -> tuple[str, dict[str, int]]:
        """Returns the notation of a vocabulary, and ids by token; tokens of the same notation are comparable."""
        values = {"kind": self.kind, **self.describe()}
        return json.dumps(values, sort_keys=True), {str(i): i for i in range(self.own_size)}


def with_context(tokenizer: Tokenizer) -> SpecialTokens:
    """Returns this package's special tokens for a tokenizer that decodes tokens differently at the start of a text.

    `context` is a token with which an encoded text may end, and which has a text and is not a single byte.
    """
    texts = filter(None, (tokenizer.decode([i]) for i in range(FIRST, tokenizer.vocab_size)))
    last = (i for text in texts for i in tokenizer.encode(text)[-1:] if i not in tokenizer.fallback_bytes)
    return dataclasses.replace(DEFAULT_SPECIAL_TOKENS, context=next((i for i in last if tokenizer.decode([i])), None))


def special_from_json(values: dict[str, Any]) -> SpecialTokens:
    """Restores special tokens from their fields, whose tuples JSON writes as lists."""
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list | tuple)}
    return SpecialTokens(**{**values, **lists, "names": tuple((i, name) for i, name in values["names"])})
