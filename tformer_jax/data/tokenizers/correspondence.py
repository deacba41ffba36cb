"""Tokens that two vocabularies share."""

import json
from typing import Any, NamedTuple

import tokenizers as hf

from tformer_jax.data.tokenizers.base import FIRST, Tokenizer
from tformer_jax.data.tokenizers.extended import ExtendedTokenizer
from tformer_jax.data.tokenizers.normalization import NormalizedTokenizer
from tformer_jax.data.tokenizers.pretrained import CheckpointTokenizer
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer


class Correspondence(NamedTuple):
    """Ids of the shared tokens in two vocabularies, in the order of the first one."""

    here: tuple[int, ...]
    there: tuple[int, ...]
    tokens_there: int
    """Number of tokens of the second vocabulary, shared or not."""


def correspondence(here: Tokenizer, there: Tokenizer) -> Correspondence | None:
    """Returns the tokens that two tokenizers share, special ones by their names; None if they are not comparable.

    Tokens are compared as the vocabularies write them: "_the" at the start of a word is not "the" within one.
    Vocabularies with another notation, such as those of byte-level BPE and WordPiece, are not comparable; those of
    SentencePiece and tiktoken only with the same model.
    """
    (mine, ids), (theirs, others) = _vocabulary(here), _vocabulary(there)
    if mine != theirs:
        return None
    shared = [(ids[token], others[token]) for token in ids if token in others]
    return Correspondence(tuple(i for i, _ in shared), tuple(i for _, i in shared), len(others))


def _vocabulary(tokenizer: Tokenizer) -> tuple[str, dict[tuple[str, str], int]]:
    """Returns the notation of a vocabulary, and its ids by kind (special or not) and token."""
    inner = tokenizer
    while isinstance(inner, ExtendedTokenizer | NormalizedTokenizer):
        inner = inner.tokenizer
    values = inner.to_json()
    if isinstance(inner, SubwordTokenizer | CheckpointTokenizer):
        shift = FIRST if isinstance(inner, SubwordTokenizer) and not inner.own_ids else 0
        library = hf.Tokenizer.from_str(json.dumps(values["model"]))
        notation = f"tokenizers {_kinds(values['model'].get('decoder'))}"
        pieces = {token: shift + i for token, i in library.get_vocab().items()}
    elif isinstance(inner, CharacterTokenizer):
        notation, pieces = inner.kind, {piece: FIRST + number for number, piece in enumerate(inner.pieces)}
    else:
        notation, pieces = json.dumps(values, sort_keys=True), {str(i): i for i in range(inner.vocab_size)}
    names = dict(tokenizer.special.names)
    ordinary = {("ordinary", piece): i for piece, i in pieces.items() if i not in names}
    return notation, {("special", name): i for i, name in names.items()} | ordinary


def _kinds(decoder: Any) -> Any:
    """Returns the type of a decoder of the library, and those of its parts."""
    return decoder and (decoder["type"], [_kinds(part) for part in decoder.get("decoders", ())])
