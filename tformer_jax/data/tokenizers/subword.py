"""Subword tokenizers of Hugging Face's `tokenizers` library, trained or loaded from a `tokenizer.json`."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.base import FIRST, UNKNOWN_MARK, decode_tokens, ordinary, with_context
from tformer_jax.special_tokens import SPECIAL_TOKENS, UNK, SpecialTokens

LONGEST_WORD = 1000
"""Maximum number of characters of a word that WordPiece splits; a longer one, which takes seconds, is unknown."""


class SubwordTokenizer:
    """Byte-level BPE or Unigram, which are lossless; WordPiece; or any other `tokenizer.json`.

    Ids of a tokenizer whose first tokens are not this package's special tokens are shifted past them. Its own special
    tokens are never encoded from texts, except the unknown token.
    """

    def __init__(self, kind: str, tokenizer: hf.Tokenizer):
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.kind, self._tokenizer = kind, tokenizer
        own = [tokenizer.token_to_id(name) for name in SPECIAL_TOKENS] == list(range(FIRST))
        self._shift = 0 if own else FIRST
        self.own_ids = own
        """Whether the ids are those of the library's tokenizer."""
        self.vocab_size = self._shift + max(tokenizer.get_vocab().values()) + 1
        byte_ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.fallback_bytes = frozenset(self._shift + i for i in byte_ids if i is not None)
        self.special = with_context(self)
        if not own:
            self.special = self._with_own_special_tokens(self.special)

    @classmethod
    def train(
        cls, kind: str, texts: Iterable[str], vocab_size: int, *, split_digits: bool, alphabet: Iterable[str] = ()
    ) -> "SubwordTokenizer":
        """Trains a vocabulary of at most `vocab_size` tokens.

        It has the special tokens and the 256 bytes; WordPiece has the characters of the texts instead of bytes.

        Args:
            alphabet: further texts whose characters a WordPiece vocabulary has.

        Raises:
            UserError: `vocab_size` is too small for them.
        """
        options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "special_tokens": list(SPECIAL_TOKENS),
            "show_progress": False,
        }
        if kind == "wordpiece":
            return cls(kind, _word_piece(list(texts), alphabet, vocab_size, options))
        alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < len(alphabet) + FIRST:
            raise UserError(
                f"data.vocab_size={vocab_size}: a byte-level vocabulary needs at least {len(alphabet) + FIRST}"
            )
        options["initial_alphabet"] = alphabet
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

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SubwordTokenizer":
        """Restores the tokenizer from `to_json`."""
        return cls(values["kind"], hf.Tokenizer.from_str(json.dumps(values["model"])))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True  # the library does not pickle it

    def encode(self, text: str) -> list[int]:
        """Encodes a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text, in parallel."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if not self._shift:
            return [encoding.ids for encoding in encoded]
        return [[self._shift + i for i in encoding.ids] for encoding in encoded]

    def decode(self, ids: Iterable[int], *, unknown: str = "") -> str:
        """Decodes ids; invalid UTF-8 becomes U+FFFD."""
        shown = {UNK, self.special.unknown} if unknown else set()
        kept = list(ordinary(ids, unknown=bool(unknown)))
        if shown.isdisjoint(kept):
            return self._tokenizer.decode([i - self._shift for i in kept])
        hidden = self.special.name_of.keys() - shown
        names = (UNKNOWN_MARK if i in shown else self._tokenizer.id_to_token(i - self._shift) for i in kept)
        tokens = [name for i, name in zip(kept, names, strict=True) if i not in hidden and name is not None]
        return decode_tokens(self._tokenizer, tokens).replace(UNKNOWN_MARK, unknown)

    def _with_own_special_tokens(self, special: SpecialTokens) -> SpecialTokens:
        """Adds the special tokens and the unknown token of the library's tokenizer."""
        model = json.loads(self._tokenizer.to_str())["model"]
        unknown = model.get("unk_id")
        if name := model.get("unk_token"):
            unknown = self._tokenizer.token_to_id(name)
        added = self._tokenizer.get_added_tokens_decoder()
        names = ((self._shift + i, token.content) for i, token in added.items() if token.special)
        return dataclasses.replace(
            special,
            names=(*special.names, *names),
            unknown=special.unknown if unknown is None else self._shift + unknown,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the kind, and the library's JSON under `model`."""
        return {"kind": self.kind, "model": json.loads(self._tokenizer.to_str())}


def _word_piece(
    texts: Sequence[str], alphabet: Iterable[str], vocab_size: int, options: dict[str, Any]
) -> hf.Tokenizer:
    """Trains a WordPiece vocabulary, which has the characters of `texts` and `alphabet`.

    The library numbers characters within words in the random order of a hash table, which also decides between pairs of
    equal frequency; here they come first, in order.
    """
    words = hf.pre_tokenizers.BertPreTokenizer()
    starts: set[str] = set()
    within: set[str] = set()
    for text in itertools.chain(texts, alphabet):
        for word, _ in words.pre_tokenize_str(text):
            starts.add(word[0])
            within.update(word[1:])
    first = [*options["special_tokens"], *(f"##{letter}" for letter in sorted(within))]
    options = options | {"initial_alphabet": sorted(starts)}
    trained = hf.Tokenizer(hf.models.WordPiece(unk_token=SPECIAL_TOKENS[UNK]))
    trained.pre_tokenizer = words
    trained.train_from_iterator(texts, hf.trainers.WordPieceTrainer(**options | {"special_tokens": first}))
    if (least := trained.get_vocab_size()) > vocab_size:
        raise UserError(
            f"data.vocab_size={vocab_size}: a WordPiece vocabulary of these texts needs at least {least}, for each "
            "character at the start of words and within them"
        )
    tokenizer = hf.Tokenizer(
        hf.models.WordPiece(trained.get_vocab(), unk_token=SPECIAL_TOKENS[UNK], max_input_chars_per_word=LONGEST_WORD)
    )
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = hf.decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(options["special_tokens"])
    return tokenizer
