"""Loads the tokenizers of checkpoints without tokenizer files, such as PyTorch state dicts."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.checkpoints import of_library
from tformer_jax.data.tokenizers.declared import add_named
from tformer_jax.data.tokenizers.pair import Tokenizers, load_file
from tformer_jax.data.tokenizers.pretrained import CheckpointTokenizer
from tformer_jax.special_tokens import SpecialTokens

ROLES = {
    "bos": ("<s>", "<bos>", "[BOS]", "<sos>", "<|endoftext|>", "[CLS]"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "[SEP]"),
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
}
"""Names of special tokens; the first one that a vocabulary has is taken."""


def load_standalone_tokenizers(files: Sequence[Path], *, pair: bool) -> Tokenizers:
    """Reads one tokenizer, or those of the source and the target.

    A file is a `tokenizer.json`, a tokenizer of a run folder, or a `.txt`: the text whose sorted characters are the
    vocabulary, without special tokens, as nanoGPT's character-level data has. The decoder of a pair starts with BOS,
    and targets have no other tokens around them than EOS.

    Raises:
        UserError: a file is missing or damaged, or there are more files than tokenizers.
    """
    most = 2 if pair else 1
    if len(files) > most:
        raise UserError(f"{len(files)} tokenizers are given, but this model has {most}: leave out {files[most]}")
    source, target = _load(files[0]), _load(files[-1])
    if pair and isinstance(target, CheckpointTokenizer):
        target.special = dataclasses.replace(target.special, before=(), after=())
    return Tokenizers(source, target)


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        raise UserError(f"{path} does not exist: name the file of a tokenizer")
    if path.suffix == ".txt":
        return _characters_of(path)
    if path.read_bytes().startswith(b'{"kind"'):
        return load_file(path)
    try:
        tokenizer = hf.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a valid tokenizer ({error})") from error
    vocab = tokenizer.get_vocab()
    found = {role: name for role, names in ROLES.items() for name in reversed(names) if name in vocab}
    if "eos" not in found:
        raise UserError(f"{path} has no EOS token: one of {', '.join(ROLES['eos'])}")
    ids = {f"{role}_token_id": tokenizer.token_to_id(name) for role, name in found.items()}
    options = {f"{role}_token": name for role, name in found.items()}
    add_named(tokenizer, options)
    return of_library(tokenizer, ids, options).target


def _characters_of(path: Path) -> CheckpointTokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): convert it") from None
    if not text:
        raise UserError(f"{path} is empty: name the text whose characters are the vocabulary")
    return characters(text)


def characters(text: str) -> CheckpointTokenizer:
    """Returns the tokenizer whose ids are the positions of the sorted characters of a text; it drops others.

    Its EOS token is outside of the vocabulary: texts end only at their maximum length.
    """
    vocab = {character: number for number, character in enumerate(sorted(set(text)))}
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab, []))
    tokenizer.decoder = hf.decoders.Fuse()
    end = len(vocab)
    return CheckpointTokenizer(
        tokenizer, SpecialTokens(names=(), start=end, eos=(end,), bos=None, pad=None, unknown=None, suppressed=())
    )
