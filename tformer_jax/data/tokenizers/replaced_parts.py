"""Parts of a tokenizer.json that tokenizer classes of transformers 5 replace."""

import json
from typing import Any

import tokenizers as hf

from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers.declared import CLASS_ROLES

Settings = dict[str, Any]

DEFAULT_CLASSES = {"bart": "RobertaTokenizer", "bert": "BertTokenizer", "gpt2": "GPT2Tokenizer", "t5": "T5Tokenizer"}
DEFAULT_CLASSES |= dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "Qwen2Tokenizer")
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
    """Returns the class of transformers 5 that rebuilds a tokenizer from its vocabulary; "" if none does."""
    if model_type in REBUILT and "auto_map" not in options:
        return "Qwen2Tokenizer"
    kind = (options.get("tokenizer_class") or DEFAULT_CLASSES.get(model_type, "")).removesuffix("Fast")
    if model_type in WITHOUT_CLASS or (kind == "LlamaTokenizer" and not _is_character_bpe(tokenizer)):
        return ""
    return kind if kind in CLASS_ROLES else ""


def replace_parts(tokenizer: hf.Tokenizer, model_type: str, options: Settings) -> None:
    """Replaces the parts of a tokenizer that its class in transformers 5 does not read from tokenizer.json.

    A byte-level BPE that is declared as LlamaTokenizer is left as it is, as are other classes.
    """
    kind = (options.get("tokenizer_class") or DEFAULT_CLASSES.get(model_type, "")).removesuffix("Fast")
    if kind == "BertTokenizer" and isinstance(tokenizer.normalizer, hf.normalizers.BertNormalizer):
        tokenizer.normalizer = bert_normalizer(options)
    if kind in ("BartTokenizer", "GPT2Tokenizer", "RobertaTokenizer") and isinstance(
        tokenizer.pre_tokenizer, hf.pre_tokenizers.ByteLevel
    ):
        tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=options.get("add_prefix_space", False))
    if kind == "Qwen2Tokenizer" or (model_type in REBUILT and "auto_map" not in options):
        as_qwen2(tokenizer, options)
    if kind == "T5Tokenizer" and isinstance(tokenizer.model, hf.models.Unigram):
        words = hf.pre_tokenizers.WhitespaceSplit()
        tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([words, hf.pre_tokenizers.Metaspace()])
        tokenizer.decoder = hf.decoders.Metaspace()
    if kind == "LlamaTokenizer" and model_type not in WITHOUT_CLASS and _is_character_bpe(tokenizer):
        _as_llama(tokenizer, options)


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
        ConfigError: the tokenizer is no BPE.
    """
    if not isinstance(tokenizer.model, hf.models.BPE):
        raise ConfigError("its tokenizer.json has no BPE, from which transformers would build Qwen2Tokenizer")
    model, steps = tokenizer.model, hf.pre_tokenizers
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = None, None, False, False
    tokenizer.normalizer = hf.normalizers.NFC()
    split = steps.Split(hf.Regex(QWEN2_PATTERN), "isolated")
    spaced = bool(options.get("add_prefix_space"))
    tokenizer.pre_tokenizer = steps.Sequence([split, steps.ByteLevel(add_prefix_space=spaced, use_regex=False)])
    tokenizer.decoder = hf.decoders.ByteLevel()


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
