"""Tokenizers of Hugging Face's `tokenizers` library: trained, or loaded from a `tokenizer.json` or a checkpoint."""

import copy
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import tokenizers as hf

from tformer_jax.config import DataConfig
from tformer_jax.data.characters import frequent_characters
from tformer_jax.data.tokenizers.base import FIRST, UNKNOWN_MARK, Tokenizer, special_from_json, with_context
from tformer_jax.special_tokens import SPECIAL_TOKENS, UNK, SpecialTokens

LONGEST_WORD = 1000
"""Maximum number of characters of a word that WordPiece splits; a longer one, which takes seconds, is unknown."""
SUBWORDS = (*("vocab_size", "tokenizer_examples", "split_digits"), "character_coverage", "byte_fallback")
"""Settings that train BPE and Unigram."""
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
"""Words of vocabularies of characters: GPT-2's, but combining marks, such as the vowels of Hindi, are letters."""
BYTE = "<0x{:02X}>"
"""Names of byte-fallback tokens."""
CHECKPOINT = "checkpoint"
"""The kind whose ids and special tokens are a checkpoint's, as transformers reads them."""


class HFTokenizer(Tokenizer):
    """A tokenizer of the library, as in a `tokenizer.json`.

    Ids of a library whose first tokens are not this package's special tokens are shifted past them. Its own special
    tokens are never encoded from texts, except the unknown token. A checkpoint's tokenizer keeps its ids, and reads
    names of special tokens in a text as these tokens, as transformers does.

    Args:
        special: the special tokens of a checkpoint; None: this package's.
        split_special_tokens: a checkpoint's names of special tokens are split like other texts, as with this option of
            transformers.
    """

    kind = "file"
    settings: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, library: hf.Tokenizer, special: SpecialTokens | None = None, *, split_special_tokens: bool = False
    ):
        self.kind = type(self).kind if special is None else CHECKPOINT
        self.backend_tokenizer = library
        self.split_special_tokens = split_special_tokens or special is None
        library.encode_special_tokens = self.split_special_tokens
        library.no_truncation()
        library.no_padding()
        own = [library.token_to_id(name) for name in SPECIAL_TOKENS] == list(range(FIRST))
        self._shift = 0 if own or special is not None else FIRST
        self.vocab_size = self._shift + max(library.get_vocab().values()) + 1
        byte_ids = (library.token_to_id(BYTE.format(byte)) for byte in range(256))
        self.fallback_bytes = frozenset(self._shift + i for i in byte_ids if i is not None)
        self.special = special or self._with_library_tokens(with_context(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.backend_tokenizer.encode_special_tokens = self.split_special_tokens  # the library does not pickle it

    @property
    def unknown_ids(self) -> set[int]:
        return super().unknown_ids | ({UNK} if self._shift else set())

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text, in parallel."""
        rows = [encoding.ids for encoding in self.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        return [[self._shift + i for i in row] for row in rows] if self._shift else rows

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        shown = self.unknown_ids
        if not unknown or shown.isdisjoint(ids):
            return self.backend_tokenizer.decode([i - self._shift for i in ids] if self._shift else ids)
        names = (UNKNOWN_MARK if i in shown else self.backend_tokenizer.id_to_token(i - self._shift) for i in ids)
        tokens, decoder = [name for name in names if name is not None], self.backend_tokenizer.decoder
        return (" ".join(tokens) if decoder is None else decoder.decode(tokens)).replace(UNKNOWN_MARK, unknown)

    def without_special_names(self) -> Tokenizer:
        if self.split_special_tokens:
            return self
        changed = copy.copy(self)
        changed.backend_tokenizer = hf.Tokenizer.from_str(self.backend_tokenizer.to_str())
        changed.backend_tokenizer.encode_special_tokens = changed.split_special_tokens = True
        return changed

    def without_added(self, size: int) -> Tokenizer:
        if self.kind != CHECKPOINT or not self.is_plain:
            return self
        model = self._model()
        model["added_tokens"] = [token for token in model["added_tokens"] if token["id"] < size or not token["special"]]
        library, split = hf.Tokenizer.from_str(json.dumps(model)), self.split_special_tokens
        limited = HFTokenizer(library, self.special.below(size), split_special_tokens=split)
        limited.chat = self.chat
        return limited

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        library = hf.Tokenizer.from_str(json.dumps(values["model"]))
        special = special_from_json(values["special"]) if "special" in values else None
        return cls(library, special, split_special_tokens=bool(values.get("split_special_tokens")))

    @classmethod
    def from_file(cls, path: Path) -> Self:
        return cls(hf.Tokenizer.from_file(str(path)))

    def describe(self) -> dict[str, Any]:
        """Returns the library's JSON under `model`, and the special tokens of a checkpoint."""
        if self.kind != CHECKPOINT:
            return {"model": self._model()}
        split = {"split_special_tokens": True} if self.split_special_tokens else {}
        return {"model": self._model(), "special": dataclasses.asdict(self.own_special), **split}

    def to_library(self) -> hf.Tokenizer | None:
        return None if self._shift else hf.Tokenizer.from_str(self.backend_tokenizer.to_str())

    def vocabulary(self) -> tuple[str, dict[str, int]]:
        from tformer_jax.data.tokenizers.notation import notation_of

        ids = self.backend_tokenizer.get_vocab()
        return notation_of(self._model()), {token: self._shift + i for token, i in ids.items()}

    def _model(self) -> dict[str, Any]:
        return json.loads(self.backend_tokenizer.to_str())

    def _with_library_tokens(self, special: SpecialTokens) -> SpecialTokens:
        """Adds the special tokens and the unknown token of a library whose ids are shifted."""
        if not self._shift:
            return special
        model = self._model()["model"]
        name, unknown = model.get("unk_token"), model.get("unk_id")
        unknown = self.backend_tokenizer.token_to_id(name) if name else unknown
        added = self.backend_tokenizer.get_added_tokens_decoder()
        names = ((self._shift + i, token.content) for i, token in added.items() if token.special)
        unknown = special.unknown if unknown is None else self._shift + unknown
        return dataclasses.replace(special, names=(*special.names, *names), unknown=unknown)


class BPE(HFTokenizer):
    """BPE of bytes, which is lossless, or of characters."""

    kind = "bpe"
    settings = SUBWORDS
    is_bpe = True

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> Self:
        """Trains a vocabulary of at most `cfg.vocab_size` tokens, with the special tokens and bytes or characters."""
        if cfg.character_coverage is None:
            return cls(_train_bytes(cfg, texts, hf.models.BPE(), hf.trainers.BpeTrainer))
        library = _train_characters(cfg, texts, hf.models.BPE(), hf.trainers.BpeTrainer)
        trained = json.loads(library.to_str())["model"]
        ranked = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
        pieces = [*SPECIAL_TOKENS, *_byte_pieces(cfg), *ranked[FIRST:]]
        options = {"unk_token": SPECIAL_TOKENS[UNK], "byte_fallback": cfg.byte_fallback}
        merges = [tuple(merge) for merge in trained["merges"]]
        library.model = hf.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, **options)
        return cls(library)


class Unigram(HFTokenizer):
    """Unigram of bytes, which is lossless, or of characters."""

    kind = "unigram"
    settings = SUBWORDS

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> Self:
        """Trains a vocabulary of at most `cfg.vocab_size` tokens, with the special tokens and bytes or characters."""
        unknown = {"unk_token": SPECIAL_TOKENS[UNK]}
        if cfg.character_coverage is None:
            return cls(_train_bytes(cfg, texts, hf.models.Unigram(), hf.trainers.UnigramTrainer, **unknown))
        library = _train_characters(cfg, texts, hf.models.Unigram(), hf.trainers.UnigramTrainer, **unknown)
        trained = [tuple(piece) for piece in json.loads(library.to_str())["model"]["vocab"]]
        pieces = [*trained[:FIRST], *((piece, 0.0) for piece in _byte_pieces(cfg)), *trained[FIRST:]]
        library.model = hf.models.Unigram(pieces, UNK, cfg.byte_fallback)
        return cls(library)


class WordPiece(HFTokenizer):
    """WordPiece; words with characters that the training texts lack are unknown."""

    kind = "wordpiece"
    settings = ("vocab_size", "tokenizer_examples")
    separator = " "

    @classmethod
    def train(cls, cfg: DataConfig, texts: Iterable[str], all_texts: Iterable[str]) -> Self:
        """Trains a vocabulary of at most `cfg.vocab_size` tokens, with the characters of `texts` and `all_texts`.

        The library numbers characters within words in the random order of a hash table, which also decides between
        pairs of equal frequency; here they come first, in order.
        """
        texts, unknown = list(texts), SPECIAL_TOKENS[UNK]
        words = hf.pre_tokenizers.BertPreTokenizer()
        starts: set[str] = set()
        within: set[str] = set()
        for text in itertools.chain(texts, all_texts):
            for word, _ in words.pre_tokenize_str(text):
                starts.add(word[0])
                within.update(word[1:])
        first = [*SPECIAL_TOKENS, *(f"##{letter}" for letter in sorted(within))]
        options = _options(cfg) | {"special_tokens": first, "initial_alphabet": sorted(starts)}
        trained = hf.Tokenizer(hf.models.WordPiece(unk_token=unknown))
        trained.pre_tokenizer = words
        trained.train_from_iterator(texts, hf.trainers.WordPieceTrainer(**options))
        vocab = trained.get_vocab()
        if len(vocab) > cfg.vocab_size:
            least = f"a WordPiece vocabulary of these texts needs at least {len(vocab)}"
            raise cfg.error("vocab_size", f"{least}, for each character at the start of words and within them")
        library = hf.Tokenizer(hf.models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=LONGEST_WORD))
        library.pre_tokenizer = words
        library.decoder = hf.decoders.WordPiece(cleanup=False)
        library.add_special_tokens(list(SPECIAL_TOKENS))
        return cls(library)


def _train_bytes(cfg: DataConfig, texts: Iterable[str], model: Any, trainer: Any, **options: Any) -> hf.Tokenizer:
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    if cfg.vocab_size < len(alphabet) + FIRST:
        raise cfg.error("vocab_size", f"a byte-level vocabulary needs at least {len(alphabet) + FIRST}")
    library = hf.Tokenizer(model)
    library.pre_tokenizer = _words(cfg, hf.pre_tokenizers.ByteLevel(add_prefix_space=False))
    library.decoder = hf.decoders.ByteLevel()
    library.train_from_iterator(texts, trainer(initial_alphabet=alphabet, **_options(cfg), **options))
    return library


def _train_characters(cfg: DataConfig, texts: Iterable[str], model: Any, trainer: Any, **options: Any) -> hf.Tokenizer:
    """Trains a model of characters, without byte-fallback tokens, for which it leaves room."""
    texts = list(texts)
    assert cfg.character_coverage is not None
    alphabet = frequent_characters(texts, cfg.character_coverage)
    room = cfg.vocab_size - len(_byte_pieces(cfg))
    if room < len(alphabet) + FIRST:
        least = cfg.vocab_size - room + len(alphabet) + FIRST
        raise cfg.error("vocab_size", f"a vocabulary with these characters needs at least {least}")
    library = hf.Tokenizer(model)
    library.pre_tokenizer = _words(cfg, hf.pre_tokenizers.Split(hf.Regex(WORDS), "isolated"))
    library.decoder = hf.decoders.Sequence([hf.decoders.ByteFallback(), hf.decoders.Fuse()])
    others = re.compile(f"[^{re.escape(''.join(alphabet))}]+")
    covered = (part for text in texts for part in others.split(text))
    options |= _options(cfg) | {"vocab_size": room}
    library.train_from_iterator(covered, trainer(initial_alphabet=alphabet, **options))
    return library


def _words(cfg: DataConfig, words: Any) -> hf.pre_tokenizers.PreTokenizer:
    """Returns what splits a text into words, and digits if `cfg.split_digits`."""
    by_digit = [hf.pre_tokenizers.Digits(individual_digits=True)] if cfg.split_digits else []
    return hf.pre_tokenizers.Sequence([*by_digit, words])


def _byte_pieces(cfg: DataConfig) -> list[str]:
    """Returns the byte-fallback tokens of a vocabulary of characters; [] without `cfg.byte_fallback`."""
    return [BYTE.format(byte) for byte in range(256)] if cfg.byte_fallback else []


def _options(cfg: DataConfig) -> dict[str, Any]:
    return {"vocab_size": cfg.vocab_size, "special_tokens": list(SPECIAL_TOKENS), "show_progress": False}
