"""Writes tokenizers in the formats that transformers reads."""

import json
from pathlib import Path
from typing import Any

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.as_library import library_of, with_clean_whitespace
from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.extended import SENTINEL_TOKENS, ExtendedTokenizer, mask_of, unextended
from tformer_jax.data.tokenizers.normalization import WHITESPACE, NormalizedTokenizer
from tformer_jax.data.tokenizers.pair import Tokenizers
from tformer_jax.data.tokenizers.pretrained import CheckpointTokenizer, PiecesTokenizer
from tformer_jax.data.tokenizers.replaced_parts import REBUILT, as_qwen2
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer
from tformer_jax.special_tokens import SpecialTokens

ROLES = ("bos", "eos", "unk", "pad")
CLASSES = {"t5": "T5Tokenizer", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer"}
"""Tokenizers of transformers that read a SentencePiece model, by `model_type`; those of others are Llama's."""

CODE = '''"""Reads tokenizer.json as it is."""

from transformers import PreTrainedTokenizerFast


class ExportedTokenizer(PreTrainedTokenizerFast):
    """A tokenizer whose parts are those of tokenizer.json."""
'''


def save_tokenizers(folder: Path, tokenizers: Tokenizers, model_type: str, *, pair: bool) -> str | None:
    """Writes the tokenizers into an existing folder.

    Args:
        pair: the model is a `Seq2Seq` model, whose sources and targets end in an EOS token.

    Returns:
        Why there is no such format for these tokenizers; None if they were written.
    """
    source, target = (_without_added(tokenizer) for tokenizer in (tokenizers.source, tokenizers.target))
    special = tokenizers.target.special
    options: dict[str, Any] = _roles(special) | {"clean_up_tokenization_spaces": False}
    if isinstance(source, PiecesTokenizer) and isinstance(target, PiecesTokenizer):
        _save_pieces(folder, source, target, model_type)
        options |= {"tokenizer_class": "MarianTokenizer"} if source.vocab is not None else _pieces(target, model_type)
    elif tokenizers.source.to_json() != tokenizers.target.to_json():
        return "the source and the target have different tokenizers"
    elif (library := _library(tokenizers.target)) is not None:
        own = not isinstance(unextended(target), CheckpointTokenizer)
        if own:
            ends = [(options["eos_token"], special.eos[0])] if pair else []
            template = " ".join(("$A", *(name for name, _ in ends)))
            library.post_processor = hf.processors.TemplateProcessing(single=template, special_tokens=ends)
        split = own or getattr(unextended(target), "split_special_tokens", False)
        options |= {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": split}
        options |= _as_written(folder) if model_type in REBUILT and not _is_qwen2(library) else {}
        library.save(str(folder / "tokenizer.json"))
    else:
        return _why_not(target)
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    return None


def _as_written(folder: Path) -> dict[str, Any]:
    """Makes `AutoTokenizer` read tokenizer.json as it is, although the class of the model type builds its own parts.

    transformers 5 leaves the declared class to its default only if tokenizer_config.json names a class outside of the
    library, which it imports only if the caller trusts the folder's code.
    """
    (folder / "exported_tokenizer.py").write_text(CODE, encoding="utf-8")
    return {"auto_map": {"AutoTokenizer": [None, "exported_tokenizer.ExportedTokenizer"]}}


def _is_qwen2(library: hf.Tokenizer) -> bool:
    """Returns whether Qwen2Tokenizer has the parts of this tokenizer."""
    rebuilt = hf.Tokenizer.from_str(library.to_str())
    try:
        as_qwen2(rebuilt, {})
    except UserError:
        return False
    return rebuilt.to_str() == library.to_str()


def _without_added(tokenizer: Tokenizer) -> Tokenizer:
    """Removes the wrapper of a tokenizer to which an objective added no token."""
    return tokenizer.tokenizer if isinstance(tokenizer, ExtendedTokenizer) and not tokenizer.added else tokenizer


def _save_pieces(folder: Path, source: PiecesTokenizer, target: PiecesTokenizer, model_type: str) -> None:
    if source.vocab is None:
        name = "spiece.model" if model_type == "t5" else "tokenizer.model"
        (folder / name).write_bytes(target.model)
        return
    (folder / "source.spm").write_bytes(source.model)
    (folder / "target.spm").write_bytes(target.model)
    (folder / "vocab.json").write_text(json.dumps(source.vocab, ensure_ascii=False), encoding="utf-8")


def _pieces(tokenizer: PiecesTokenizer, model_type: str) -> dict[str, Any]:
    """Returns the fields of tokenizer_config.json about added tokens, those around a text, and spaces."""
    tokens = tokenizer.added.tokens
    sentinels = {fields["content"] for fields in tokens.values()} & {*SENTINEL_TOKENS}
    return {
        "tokenizer_class": CLASSES.get(model_type, "LlamaTokenizer"),
        "add_bos_token": bool(tokenizer.special.before),
        "add_eos_token": bool(tokenizer.special.after),
        "added_tokens_decoder": {str(i): fields for i, fields in tokens.items()},
        "extra_ids": len(sentinels),
        "legacy": tokenizer.spaced,
    }


def _library(tokenizer: Tokenizer) -> hf.Tokenizer | None:
    """Returns a copy of the library's tokenizer, with the tokens that an objective added; None if there is none."""
    inner = unextended(tokenizer)
    library = _library_of(inner)
    if library is None:
        return None
    if isinstance(tokenizer, ExtendedTokenizer):
        library.add_special_tokens(list(tokenizer.added))
        expected = range(inner.vocab_size, tokenizer.vocab_size)
        if any(library.token_to_id(name) != i for name, i in zip(tokenizer.added, expected, strict=True)):
            return None
    return library


def _library_of(tokenizer: Tokenizer) -> hf.Tokenizer | None:
    """Returns a copy of the library's tokenizer for one that no objective extends; None if there is none."""
    if isinstance(tokenizer, NormalizedTokenizer):
        library = _library_of(tokenizer.tokenizer) if tokenizer.steps == (WHITESPACE,) else None
        return None if library is None else with_clean_whitespace(library)
    if isinstance(tokenizer, ByteTokenizer | CharacterTokenizer):
        return library_of(tokenizer)
    if isinstance(tokenizer, CheckpointTokenizer) or (isinstance(tokenizer, SubwordTokenizer) and tokenizer.own_ids):
        return hf.Tokenizer.from_str(json.dumps(tokenizer.to_json()["model"]))
    return None


def _why_not(tokenizer: Tokenizer) -> str:
    """Returns why `_library` has no tokenizer."""
    inner = unextended(tokenizer)
    if isinstance(inner, NormalizedTokenizer) and inner.steps != (WHITESPACE,):
        return f"tokenizer.json cannot hold data.normalize={tuple(s for s in inner.steps if s != WHITESPACE)!r}"
    return f"tokenizer.json cannot hold a tokenizer of the kind {inner.to_json()['kind']!r} with these ids"


def _roles(special: SpecialTokens) -> dict[str, Any]:
    """Returns the names of special tokens by their roles, as in `tokenizer_config.json`."""
    ids = dict(zip(ROLES, (special.bos, special.eos[0], special.unknown, special.pad), strict=True))
    found = {f"{role}_token": special.name(i) for role, i in ids.items() if i is not None}
    if mask := mask_of(special):
        found["mask_token"] = mask[1]
    return {role: name for role, name in found.items() if name is not None}
