"""Parts of a tokenizer.json that tokenizer classes of transformers 5 replace."""

import base64
import json
from collections.abc import Callable
from typing import Any

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.declared import content

Settings = dict[str, Any]

DEFAULT_CLASSES = {"bart": "RobertaTokenizer", "bert": "BertTokenizer", "gpt2": "GPT2Tokenizer", "t5": "T5Tokenizer"}
DEFAULT_CLASSES |= dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "Qwen2Tokenizer")
DEFAULT_CLASSES |= dict.fromkeys(("gemma2", "gemma3_text"), "GemmaTokenizer")
"""Class of each model type if tokenizer_config.json names none, for classes that replace parts."""
WITHOUT_CLASS = ("mistral", "mixtral", "stablelm")
"""Model types whose tokenizer.json is read as it is even if LlamaTokenizer is named."""
REBUILT = ("qwen2",)
"""Model types whose tokenizer is Qwen2Tokenizer, whatever tokenizer_config.json says, unless it names remote code."""
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization pattern of Qwen2Tokenizer."""


def rebuilding_class(tokenizer: hf.Tokenizer, model_type: str, options: Settings) -> str:
    """Returns the class of transformers 5 that rebuilds a tokenizer from its vocabulary; "" if none does.

    A byte-level BPE that is declared as LlamaTokenizer is read as it is.
    """
    if model_type in REBUILT and "auto_map" not in options:
        return "Qwen2Tokenizer"
    kind = (options.get("tokenizer_class") or DEFAULT_CLASSES.get(model_type, "")).removesuffix("Fast")
    if model_type in WITHOUT_CLASS or kind not in BUILDERS:
        return ""
    if kind == "LlamaTokenizer":
        return kind if _is_character_bpe(tokenizer) else ""
    return kind if isinstance(tokenizer.model, MODELS.get(kind, hf.models.BPE)) else ""


def replace_parts(tokenizer: hf.Tokenizer, kind: str, options: Settings) -> None:
    """Replaces the parts of a tokenizer that its rebuilding class `kind` does not read from tokenizer.json."""
    if kind:
        BUILDERS[kind](tokenizer, options)


def replace_ends(tokenizer: hf.Tokenizer, kind: str, options: Settings) -> None:
    """Replaces the tokens around a text by those of the class `kind`, if it has its own.

    Args:
        options: settings of tokenizer_config.json, with the special tokens of the class by role.
    """
    if kind in ("BartTokenizer", "BertTokenizer", "RobertaTokenizer"):
        surround(tokenizer, [content(options["cls_token"])], [content(options["sep_token"])])
    if kind == "T5Tokenizer":
        surround(tokenizer, [], ["</s>"])


def surround(tokenizer: hf.Tokenizer, before: list[str], after: list[str]) -> None:
    """Puts special tokens around the texts of a tokenizer."""
    ids = [(name, tokenizer.token_to_id(name)) for name in dict.fromkeys((*before, *after))]
    template = " ".join((*before, "$A", *after))
    tokenizer.post_processor = hf.processors.TemplateProcessing(single=template, special_tokens=ids)


def _as_bert(tokenizer: hf.Tokenizer, options: Settings) -> None:
    tokenizer.normalizer = bert_normalizer(options)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = hf.decoders.WordPiece(prefix="##")


def bert_normalizer(options: Settings) -> hf.normalizers.BertNormalizer:
    """Returns the normalizer of BertTokenizer."""
    return hf.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )


def as_qwen2(tokenizer: hf.Tokenizer, options: Settings) -> None:
    """Replaces the parts of a BPE that Qwen2Tokenizer builds itself.

    Raises:
        UserError: the tokenizer is no BPE.
    """
    if not isinstance(tokenizer.model, hf.models.BPE):
        raise UserError("its tokenizer.json has no BPE, from which transformers would build Qwen2Tokenizer")
    model, steps = tokenizer.model, hf.pre_tokenizers
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = None, None, False, False
    tokenizer.normalizer = hf.normalizers.NFC()
    split = steps.Split(hf.Regex(QWEN2_PATTERN), "isolated")
    spaced = bool(options.get("add_prefix_space"))
    tokenizer.pre_tokenizer = steps.Sequence([split, steps.ByteLevel(add_prefix_space=spaced, use_regex=False)])
    tokenizer.decoder = hf.decoders.ByteLevel()


def _as_gpt2(tokenizer: hf.Tokenizer, options: Settings) -> None:
    model = tokenizer.model
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = None, None, False, False
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=bool(options.get("add_prefix_space")))
    tokenizer.decoder = hf.decoders.ByteLevel()


def _as_t5(tokenizer: hf.Tokenizer, options: Settings) -> None:
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    steps = (step.get("precompiled_charsmap") for step in normalizer.get("normalizers", [normalizer]))
    charsmap = next(filter(None, steps), None)
    tokenizer.normalizer = hf.normalizers.Precompiled(base64.b64decode(charsmap)) if charsmap else None
    words = hf.pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([words, hf.pre_tokenizers.Metaspace()])
    tokenizer.decoder = hf.decoders.Metaspace()


def _as_gemma(tokenizer: hf.Tokenizer, options: Settings) -> None:
    model, unknown = tokenizer.model, content(options.get("unk_token", "<unk>"))
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = unknown, None, True, True
    tokenizer.normalizer = hf.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = hf.decoders.Sequence(
        [hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
    )


def _is_character_bpe(tokenizer: hf.Tokenizer) -> bool:
    """Returns whether the model is a BPE of characters as in Llama 2, not one of bytes as in Llama 3."""
    if not isinstance(tokenizer.model, hf.models.BPE):
        return False
    described = json.loads(tokenizer.to_str())
    parts = [described["pre_tokenizer"] or {}, described["decoder"] or {}]
    nested = [step for part in parts for name in ("pretokenizers", "decoders") for step in part.get(name, ())]
    return all(part.get("type") != "ByteLevel" for part in (*parts, *nested))


def _as_llama(tokenizer: hf.Tokenizer, options: Settings) -> None:
    spaced = options.get("add_prefix_space") in (None, True)
    scheme = "never" if not spaced else "always" if options.get("legacy") else "first"
    tokenizer.model.unk_token, tokenizer.model.fuse_unk, tokenizer.model.byte_fallback = None, True, True
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    parts = [hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
    tokenizer.decoder = hf.decoders.Sequence([*parts, *([hf.decoders.Strip(" ", 1, 0)] if spaced else [])])


MODELS: dict[str, type] = {"BertTokenizer": hf.models.WordPiece, "T5Tokenizer": hf.models.Unigram}
"""Model that a class rebuilds; others rebuild a BPE."""
BUILDERS: dict[str, Callable[[hf.Tokenizer, Settings], None]] = {
    "BartTokenizer": _as_gpt2,
    "BertTokenizer": _as_bert,
    "GPT2Tokenizer": _as_gpt2,
    "GemmaTokenizer": _as_gemma,
    "LlamaTokenizer": _as_llama,
    "Qwen2Tokenizer": as_qwen2,
    "RobertaTokenizer": _as_gpt2,
    "T5Tokenizer": _as_t5,
}
"""Functions that replace the parts of a tokenizer that a class builds itself."""
