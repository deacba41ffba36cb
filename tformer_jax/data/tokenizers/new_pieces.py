"""Pieces that a vocabulary lacks: words of a list, frequent words of texts, and tokens of another tokenizer."""

import collections
import heapq
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.notation import NOTATIONS, PLAIN, SPACE, SPACED, WORDS, Notation
from tformer_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer
from tformer_jax.data.tokenizers.simple import PieceTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.surgery import pieces_of

CANDIDATES = 20
"""How many of the most frequent words are compared, per word to add."""
SPACED_WORD = re.compile(f"{SPACE}[^{SPACE}]*|[^{SPACE}]+")


def pieces_of_list(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the pieces of words after a space, or else within a word, and the words that cannot be pieces."""
    notation = _notation_of(tokenizer)
    pieces: list[str] = []
    refused: list[str] = []
    for word in words:
        texts = (text for text in (f" {word}", word) if _is_whole(tokenizer, notation, text))
        piece = next((notation.write(text) for text in texts), None)
        (refused if piece is None else pieces).append(word if piece is None else piece)
    return pieces, refused


def pieces_of_texts(tokenizer: Tokenizer, texts: Iterable[str], count: int) -> list[str]:
    """Returns the words of letters that save the most tokens if each of them becomes one.

    Args:
        count: maximum number of words.
    """
    notation, counts = _notation_of(tokenizer), collections.Counter[str]()
    for text in texts:
        counts.update(_split_words(tokenizer, text))
    pieces, words = pieces_of(tokenizer), collections.Counter[str]()
    for unit, number in counts.items():
        text = notation.read(unit) or ""
        word = _first_letters(text)
        piece = notation.write(word)
        if piece and word.strip() and piece not in pieces.present and (word == text or notation is NOTATIONS[SPACED]):
            words[piece] += number
    lengths = {piece: max(2, len(pieces.segment(piece))) for piece, _ in words.most_common(CANDIDATES * count)}
    saved = {piece: words[piece] * (length - 1) for piece, length in lengths.items()}  # an unsplit word counts as two
    return heapq.nsmallest(count, saved, key=lambda piece: (-saved[piece], piece))


def pieces_of_tokenizer(tokenizer: Tokenizer, other: Tokenizer, count: int | None) -> list[str]:
    """Returns the pieces for the tokens of another tokenizer that this one splits, in the order of their ids.

    Args:
        count: maximum number of tokens; None: all.
    """
    notation, theirs = _notation_of(tokenizer), _notation_of(other)
    special, present = dict(other.special.names), tokenizer.vocabulary()[1]
    tokens = sorted(other.vocabulary()[1].items(), key=lambda item: item[1])
    texts = (theirs.read(token) for token, i in tokens if i not in special and i not in other.fallback_bytes)
    new = (text for text in texts if text and _is_whole(tokenizer, notation, text))
    pieces = (piece for text in new if (piece := notation.write(text)) and piece not in present)
    return list(itertools.islice(pieces, count))


def _notation_of(tokenizer: Tokenizer) -> Notation:
    name = tokenizer.vocabulary()[0]
    if isinstance(tokenizer, PieceTokenizer):
        name = WORDS if isinstance(tokenizer, WordTokenizer) else PLAIN
    if name not in NOTATIONS:
        raise UserError(f"the vocabulary of a tokenizer of the kind {tokenizer.kind!r} has no pieces of text")
    return NOTATIONS[name]


def _is_whole(tokenizer: Tokenizer, notation: Notation, text: str) -> bool:
    """Returns whether a text can be one piece: the tokenizer never splits or changes it before its algorithm."""
    piece = notation.write(text)
    units = list(_split_words(tokenizer, f"x{text}"))
    continued = notation is NOTATIONS["##"] and not text.startswith(" ")
    return bool(piece) and bool(units) and units[-1].endswith(text if continued else str(piece))


def _split_words(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yields the words of a text as pieces, before an algorithm splits them further."""
    for part in tokenizer.split_symbols(tokenizer.normalize(text)):
        if isinstance(part, str):
            yield from _split_part(tokenizer, part)


def _split_part(tokenizer: Tokenizer, text: str) -> Iterable[str]:
    if isinstance(tokenizer, PieceTokenizer):
        return tokenizer.split(text)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return SPACED_WORD.findall("".join(tokenizer.split_pieces(text)))
    assert isinstance(tokenizer, HFTokenizer)
    library = tokenizer.backend_tokenizer
    text = text if library.normalizer is None else library.normalizer.normalize_str(text)
    words = library.pre_tokenizer
    units = [text] if words is None else [unit for unit, _ in words.pre_tokenize_str(text)]
    return [word for unit in units for word in SPACED_WORD.findall(unit)]


def _first_letters(text: str) -> str:
    """Returns the letters with which a text starts, with a space before them."""
    start = int(text.startswith(" "))
    other = (n for n, letter in enumerate(text[start:], start) if unicodedata.category(letter)[0] not in "LM")
    return text[: next(other, len(text))]
