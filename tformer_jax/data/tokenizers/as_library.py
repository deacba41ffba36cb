"""Builds tokenizers of the `tokenizers` library with the ids of those by bytes, characters and words."""

import tokenizers as hf

from tformer_jax.data import characters
from tformer_jax.data.tokenizers.base import FIRST
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.special_tokens import SPECIAL_TOKENS, UNK

WHITESPACE = r"\s\x1C-\x1F"
"""What `str.split` splits at, within brackets; in the library's patterns, `\\s` lacks four separators of ASCII."""


def library_of(tokenizer: ByteTokenizer | CharacterTokenizer) -> hf.Tokenizer | None:
    """Returns a tokenizer with the same ids and decoded texts; None if a piece has the name of a special token."""
    if isinstance(tokenizer, ByteTokenizer):
        library = _bytes()
    elif set(tokenizer.pieces) & set(SPECIAL_TOKENS):
        return None
    else:
        library = _words(tokenizer) if isinstance(tokenizer, WordTokenizer) else _characters(tokenizer)
    library.add_special_tokens(list(SPECIAL_TOKENS))
    return library


def with_clean_whitespace(library: hf.Tokenizer) -> hf.Tokenizer:
    """Makes a tokenizer clean texts as `characters.clean_whitespace` does before everything else."""
    rules = characters.rules(lambda code: f"\\x{{{code:x}}}")
    steps = [*(hf.normalizers.Replace(hf.Regex(pattern), text) for pattern, text in rules), hf.normalizers.Strip()]
    following = [] if library.normalizer is None else [library.normalizer]
    library.normalizer = hf.normalizers.Sequence([*steps, *following])
    return library


def _bytes() -> hf.Tokenizer:
    library = hf.Tokenizer(hf.models.BPE(_vocabulary(byte_names()), []))
    library.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = hf.decoders.ByteLevel()
    return library


def _characters(tokenizer: CharacterTokenizer) -> hf.Tokenizer:
    library = hf.Tokenizer(hf.models.BPE(_vocabulary(tokenizer.pieces), [], unk_token=SPECIAL_TOKENS[UNK]))
    library.decoder = hf.decoders.Fuse()
    return library


def _words(tokenizer: WordTokenizer) -> hf.Tokenizer:
    library = hf.Tokenizer(hf.models.WordLevel(_vocabulary(tokenizer.pieces), unk_token=SPECIAL_TOKENS[UNK]))
    reserved = "|".join(name for name in SPECIAL_TOKENS if name != SPECIAL_TOKENS[UNK])
    words = hf.Regex(
        f"(?<![^{WHITESPACE}])({reserved})(?![^{WHITESPACE}])"
    )  # unknown, although the vocabulary has them
    library.normalizer = hf.normalizers.Replace(words, SPECIAL_TOKENS[UNK])
    library.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(f"[{WHITESPACE}]+"), "removed")
    return library  # without a decoder, the library joins tokens with spaces


def _vocabulary(pieces: list[str]) -> dict[str, int]:
    special = {name: i for i, name in enumerate(SPECIAL_TOKENS)}
    return special | {piece: FIRST + number for number, piece in enumerate(pieces)}


def byte_names() -> list[str]:
    """Returns the character by which byte-level tokenizers write each byte ("Language Models are ...", 2019, code)."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]
