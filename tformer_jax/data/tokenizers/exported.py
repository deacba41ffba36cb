"""Writes tokenizers in the formats that transformers reads."""

import json
from pathlib import Path
from typing import Any

import tokenizers as hf

from tformer_jax.data.tokenizers.extended import SENTINEL_TOKENS, mask_of
from tformer_jax.data.tokenizers.pair import Tokenizers
from tformer_jax.data.tokenizers.pretrained import CheckpointTokenizer, PiecesTokenizer
from tformer_jax.data.tokenizers.subword import SubwordTokenizer
from tformer_jax.special_tokens import SpecialTokens

ROLES = ("bos", "eos", "unk", "pad")
CLASSES = {"t5": "T5Tokenizer", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer"}
"""Tokenizers of transformers that read a SentencePiece model, by `model_type`; those of others are Llama's."""


def save_tokenizers(folder: Path, tokenizers: Tokenizers, model_type: str, *, pair: bool) -> str | None:
    """Writes the tokenizers into an existing folder.

    Args:
        pair: the model is a `Seq2Seq` model, whose sources and targets end in an EOS token.

    Returns:
        Why there is no such format for these tokenizers; None if they were written.
    """
    source, target = tokenizers.source, tokenizers.target
    options: dict[str, Any] = _roles(target.special) | {"clean_up_tokenization_spaces": False}
    if isinstance(source, PiecesTokenizer) and isinstance(target, PiecesTokenizer):
        _save_pieces(folder, source, target, model_type)
        options |= {"tokenizer_class": "MarianTokenizer"} if source.vocab is not None else _pieces(target, model_type)
    elif source.to_json() != target.to_json():
        return "the source and the target have different tokenizers"
    elif isinstance(target, CheckpointTokenizer):
        _library(target).save(str(folder / "tokenizer.json"))
        options["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif isinstance(target, SubwordTokenizer) and target.own_ids:
        tokenizer = _library(target)
        if pair:
            end, name = target.special.ends[0], options["eos_token"]
            tokenizer.post_processor = hf.processors.TemplateProcessing(
                single=f"$A {name}", special_tokens=[(name, end)]
            )
        tokenizer.save(str(folder / "tokenizer.json"))
        options["tokenizer_class"] = "PreTrainedTokenizerFast"
    else:
        return f"tokenizer.json cannot hold a tokenizer of the kind {target.to_json()['kind']!r} with these ids"
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    return None


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


def _library(tokenizer: SubwordTokenizer | CheckpointTokenizer) -> hf.Tokenizer:
    """Returns a copy of the library's tokenizer."""
    return hf.Tokenizer.from_str(json.dumps(tokenizer.to_json()["model"]))


def _roles(special: SpecialTokens) -> dict[str, Any]:
    """Returns the names of special tokens by their roles, as in `tokenizer_config.json`."""
    ids = dict(zip(ROLES, (special.bos, special.ends[0], special.unknown, special.pad), strict=True))
    found = {f"{role}_token": special.name(i) for role, i in ids.items() if i is not None}
    if mask := mask_of(special):
        found["mask_token"] = mask[1]
    return {role: name for role, name in found.items() if name is not None}
