"""How vocabularies write the pieces of texts: as they are, or with marks of spaces, of bytes or of parts of words."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SPACE = "▁"
PLAIN, SPACED, BYTES, PARTS, WORDS = "plain", SPACE, "bytes", "##", "words"
"""Names of notations: texts as they are; with "▁" for spaces; the character of each byte; "##" before pieces that do
not start a word; whole words without the space before them."""


class Notation(NamedTuple):
    """Conversion between texts and the pieces that stand for them."""

    read: Callable[[str], str | None]
    """Returns the text of a piece, which starts with a space if the piece starts a word; None: it is no text."""
    write: Callable[[str], str | None]
    """Returns the piece of a text; None: no piece can stand for it."""


def byte_names() -> list[str]:
    """Returns the character by which byte-level tokenizers write each byte ("Language Models are ...", 2019, code)."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


def notation_of(library: Mapping[str, Any]) -> str:
    """Returns the name of the notation of a `tokenizer.json`."""
    if library["model"]["type"] == "WordPiece":
        return PARTS
    parts = str([library.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])
    if "'ByteLevel'" in parts:
        return BYTES
    return SPACED if SPACE in parts else WORDS if library["model"]["type"] == "WordLevel" else PLAIN


def _read_bytes(piece: str) -> str | None:
    numbers = {name: byte for byte, name in enumerate(byte_names())}
    try:
        return bytes(numbers[character] for character in piece).decode()
    except (KeyError, UnicodeDecodeError):
        return None


def _write_bytes(text: str) -> str:
    names = byte_names()
    return "".join(names[byte] for byte in text.encode())


NOTATIONS = {
    PLAIN: Notation(lambda piece: piece, lambda text: text),
    SPACED: Notation(lambda piece: piece.replace(SPACE, " "), lambda text: text.replace(" ", SPACE)),
    BYTES: Notation(_read_bytes, _write_bytes),
    PARTS: Notation(
        lambda piece: piece[2:] if piece.startswith(PARTS) else f" {piece}",
        lambda text: text[1:] if text.startswith(" ") else PARTS + text,
    ),
    WORDS: Notation(lambda piece: f" {piece}", lambda text: text[1:] if text.startswith(" ") else None),
}
