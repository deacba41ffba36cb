"""Reads tokenizers that do not come with a checkpoint: a tokenizer.json, fairseq's dictionary, a text's characters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import Settings
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.checkpoints import FAIRSEQ, wrap_library
from tformer_jax.data.tokenizers.classes import add_tokens, surround_texts
from tformer_jax.data.tokenizers.files import Tokenizers, is_saved, load_tokenizer
from tformer_jax.data.tokenizers.huggingface import CHECKPOINT, HFTokenizer
from tformer_jax.special_tokens import SpecialTokens

USUAL_NAMES = {
    "bos": ("<s>", "<bos>", "[BOS]", "<sos>", "<|endoftext|>", "[CLS]"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "[SEP]"),
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
}
"""Names of special tokens; the first one that a vocabulary has is taken."""


def load_standalone_tokenizers(files: Sequence[Path], *, pair: bool) -> Tokenizers:
    """Reads one tokenizer, or the tokenizers of the source and the target.

    A file is a `tokenizer.json`, a tokenizer of a run folder, fairseq's `dict.LANGUAGE.txt`, or another `.txt`: the
    text whose sorted characters are the vocabulary, without special tokens, as nanoGPT's character-level data has.
    The decoder of a pair starts with BOS, and targets have no other tokens around them than EOS.

    Raises:
        UserError: a file is missing or damaged, or there are more files than tokenizers.
    """
    most = 2 if pair else 1
    if len(files) > most:
        raise UserError(f"{len(files)} tokenizers are given, but this model has {most}: leave out {files[most]}")
    source, target = _load_standalone(files[0]), _load_standalone(files[-1])
    if pair and target.kind == CHECKPOINT:
        target.special = dataclasses.replace(target.special, before=(), after=())
    return Tokenizers(source, target)


def _load_standalone(path: Path) -> Tokenizer:
    if not path.is_file():
        raise UserError(f"{path} does not exist: name the file of a tokenizer")
    if is_fairseq_dictionary(path):
        return _read_fairseq_dictionary(path)
    if path.suffix == ".txt":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 (byte {error.start}): convert it") from None
        if not text:
            raise UserError(f"{path} is empty: name the text whose characters are the vocabulary")
        return character_tokenizer(text)
    if is_saved(path):
        return load_tokenizer(path)
    try:
        library = hf.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a valid tokenizer ({error})") from error
    vocab = library.get_vocab()
    roles = {role: name for role, names in USUAL_NAMES.items() for name in reversed(names) if name in vocab}
    if "eos" not in roles:
        raise UserError(f"{path} has no EOS token: one of {', '.join(USUAL_NAMES['eos'])}")
    options = {f"{role}_token": name for role, name in roles.items()}
    add_tokens(library, {}, options)
    return wrap_library(library, options, {f"{role}_token_id": vocab[name] for role, name in roles.items()}).target


def is_fairseq_dictionary(path: Path) -> bool:
    """Returns whether a file is named as fairseq's dictionaries, `dict.LANGUAGE.txt`."""
    return path.suffix == ".txt" and path.name.startswith("dict.")


def _read_fairseq_dictionary(path: Path) -> Tokenizer:
    """Reads a token and its count per line; texts are tokens between spaces, and EOS starts the decoder.

    A flag after the count gives a token that occurs again the later id. The special tokens of fairseq keep their ids:
    a line with the name of one takes an id that no text has.
    """
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    words = (line.rstrip().removesuffix(" #fairseq:overwrite").rsplit(" ", 1)[0] for line in lines)
    tokens = [*FAIRSEQ, *(f"{word} " if word in FAIRSEQ else word for word in words)]
    library = hf.Tokenizer(hf.models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    library.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    options: Settings = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), FAIRSEQ, strict=True))
    add_tokens(library, {}, options)
    surround_texts(library, [], ["</s>"])
    ids = {f"{role}_id": i for i, role in enumerate(options)}
    return wrap_library(library, options, ids | {"decoder_start_token_id": ids["eos_token_id"]}).target


def character_tokenizer(text: str) -> HFTokenizer:
    """Returns the tokenizer whose ids are the positions of the sorted characters of a text; it drops others.

    Its EOS token is outside of the vocabulary: texts end only at their maximum length.
    """
    vocab = {character: number for number, character in enumerate(sorted(set(text)))}
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab, []))
    tokenizer.decoder = hf.decoders.Fuse()
    end = len(vocab)
    special = SpecialTokens(names=(), start=end, eos=(end,), bos=None, pad=None, unknown=None, suppressed=())
    return HFTokenizer(tokenizer, special)
