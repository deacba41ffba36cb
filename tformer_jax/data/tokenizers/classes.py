"""Tokenizer classes of transformers 5: the parts that they replace in a tokenizer.json, and the tokens they add to it.

Tokens of the JSON files beside a tokenizer get the ids and rules that these classes give them.
"""

import base64
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers as hf

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import Settings, read_json
from tformer_jax.data.tokenizers.base import SENTINEL

Tokens = dict[int, hf.AddedToken]

ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BART = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
_ALBERT = dict.fromkeys(("bos", "cls"), "[CLS]") | dict.fromkeys(("eos", "sep"), "[SEP]")
_LLAMA = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_INFILLING = {role: f"▁<{role[:3].upper()}>" for role in ("prefix", "middle", "suffix", "eot")}
CLASS_ROLES: dict[str, dict[str, str]] = {
    "AlbertTokenizer": _ALBERT | {"unk": "<unk>", "pad": "<pad>", "mask": "[MASK]"},
    "BartTokenizer": _BART,
    "CodeLlamaTokenizer": _LLAMA | _INFILLING | {"fill": "<FILL_ME>"},
    "BertTokenizer": {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    "GemmaTokenizer": {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
    "GPT2Tokenizer": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "LlamaTokenizer": _LLAMA,
    "MBartTokenizer": _BART,
    "MBart50Tokenizer": {role: name for role, name in _BART.items() if role != "bos"},
    "NllbTokenizer": _BART,
    **dict.fromkeys(("Qwen2Tokenizer", "Qwen3_5Tokenizer"), dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>")),
    "RobertaTokenizer": _BART,
    "T5Tokenizer": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    "XLMRobertaTokenizer": _BART,
}
"""Names of special tokens by role that tokenizer classes of transformers 5 have unless others are given."""
DEFAULT_CLASSES = {"bart": "RobertaTokenizer", "bert": "BertTokenizer", "gpt2": "GPT2Tokenizer"}
DEFAULT_CLASSES |= {"albert": "AlbertTokenizer", "mbart": "MBartTokenizer", "t5": "T5Tokenizer", "mt5": "T5Tokenizer"}
DEFAULT_CLASSES |= {"distilbert": "BertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer"}
DEFAULT_CLASSES |= dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer")
DEFAULT_CLASSES |= dict.fromkeys(("qwen3_5", "qwen3_5_text"), "Qwen3_5Tokenizer")
DEFAULT_CLASSES |= dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "t5gemma"), "GemmaTokenizer")
"""Class of each model type if tokenizer_config.json names none, for classes that replace parts."""
LLAMAS = ("LlamaTokenizer", "CodeLlamaTokenizer")
"""Classes that rebuild a BPE of characters alone, as in Llama 2."""
TYPED = ("AlbertTokenizer", "BertTokenizer")
"""Classes that give the second text of a pair another type."""
BERT_FIELDS = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], "do_lower_case": True}
"""Fields that BertTokenizer has unless others are given."""
WITH_LANGUAGES = ("MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer")
"""Classes that add the tag of a language to each text, which is left out here."""
WITHOUT_CLASS = (
    *("mistral", "mixtral", "ministral", "phi3", "olmo2", "olmo3", "granite", "stablelm", "umt5", "modernbert"),
)
"""Model types whose tokenizer.json is read as it is, whatever class is named, unless it names remote code."""
_BERTS = ("DistilBert", "Electra", "LayoutLM", "Lxmert", "MobileBert", "SqueezeBert")
SYNONYMS = {f"{name}Tokenizer": "BertTokenizer" for name in _BERTS}
SYNONYMS |= {"MT5Tokenizer": "T5Tokenizer"}
SYNONYMS |= dict.fromkeys(("LEDTokenizer", "LongformerTokenizer"), "RobertaTokenizer")
"""Classes that build the same tokenizer as another class."""
REBUILT = {"qwen2": "Qwen2Tokenizer", "qwen3_5": "Qwen3_5Tokenizer"}
"""Classes by model type; they override tokenizer_config.json unless it names remote code."""
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization pattern of Qwen2Tokenizer."""
QWEN3_5_PATTERN = QWEN2_PATTERN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
"""Pre-tokenization pattern of Qwen3_5Tokenizer, for which combining marks are letters."""


def complete_tokenizer(
    library: hf.Tokenizer, folder: Path, options: Settings, kind: str, *, own_ends: bool = False
) -> tuple[hf.Tokenizer, Settings]:
    """Completes a tokenizer as a class of transformers does: its parts, added tokens, and the tokens around a text.

    The added tokens are listed in tokenizer_config.json; if it has no `added_tokens_decoder`, also in added_tokens.json
    and special_tokens_map.json. Tokens that the tokenizer lacks are appended in the order of the ids in these files,
    but may get other ids.

    Args:
        options: settings of tokenizer_config.json.
        kind: the class that rebuilds the tokenizer from its vocabulary; "" if it reads the file as is.
        own_ends: whether `options` say if BOS and EOS surround texts, as they do without tokenizer.json.

    Returns:
        The tokenizer, and `options` with the special tokens of the class and of special_tokens_map.json.
    """
    own = library.get_added_tokens_decoder()
    if kind:
        BUILDERS[kind](library, options)
        library = hf.Tokenizer.from_str(json.dumps(json.loads(library.to_str()) | {"added_tokens": []}))
    options = _default_roles(library, kind) | options
    if options.get("additional_special_tokens") and not options.get("extra_special_tokens"):
        options["extra_special_tokens"] = options.pop("additional_special_tokens")
    listed: dict[str, Any] | None = options.get("added_tokens_decoder")
    if listed is None:
        options |= _read_special_tokens_map(folder, options)
        declared = _read_added_tokens(folder, options) | own
    else:
        declared = {int(i): _make_token(fields) for i, fields in listed.items()}
    sentinels = options.get("extra_ids", 100) if kind == "T5Tokenizer" else 0
    add_tokens(library, declared, options, list(map(SENTINEL.format, range(sentinels))))
    if kind == "Qwen2Tokenizer":  # which adds them again, special and without rules about spaces
        library.add_special_tokens(special_names(options))
    if own_ends:
        named = (options.get(f"{role}_token") if options.get(f"add_{role}_token") else None for role in ("bos", "eos"))
        surround_texts(library, *([] if token is None else [_name_of(token)] for token in named))
    if kind == "CodeLlamaTokenizer":
        bos = _name_of(options["bos_token"])
        surround_texts(library, [bos], [], [bos, "$A", f"{bos}:1", "$B:1"])
    own_template = kind == "AlbertTokenizer" and library.post_processor is not None
    if kind in (*TYPED, "BartTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer") and not own_template:
        start, end = _name_of(options["cls_token"]), _name_of(options["sep_token"])
        second = ["$B:1", f"{end}:1"] if kind in TYPED else [end, "$B:0", end]
        surround_texts(library, [start], [end], [start, "$A", end, *second])
    if kind == "T5Tokenizer" or kind in WITH_LANGUAGES:
        first = ["$A", "</s>"] if kind == "T5Tokenizer" else ["$A"]
        surround_texts(library, [], ["</s>"], [*first, "$B:0", "</s>"])
    return library, options


def _default_roles(library: hf.Tokenizer, kind: str) -> Settings:
    """Returns the default special tokens by role: the tokens of a class, and the token with which a file pads."""
    roles = CLASS_ROLES.get(kind, {})
    if kind in ("", *LLAMAS) and library.padding is not None:
        roles = roles | {"pad": library.padding["pad_token"]}
    return {f"{role}_token": name for role, name in roles.items()}


def class_fields(library: hf.Tokenizer, model_type: str, options: Settings) -> Settings:
    """Returns the fields of tokenizer_config.json about pairs and letters that `options` leave to the class."""
    kind = rebuilding_class(library, model_type, options)
    roles = CLASS_ROLES.get(kind, {})
    fields = {f"{role}_token": roles[role] for role in ("cls", "sep") if role in roles}
    return fields | BERT_FIELDS if kind == "BertTokenizer" else fields


def special_names(options: Settings) -> list[str]:
    """Returns the names of all special tokens in `tokenizer_config.json`."""
    return list(dict.fromkeys(token.content for token in (*_tokens_by_role(options), *_extra_tokens(options))))


def names_by_role(options: Settings) -> dict[str, str]:
    """Returns the names of special tokens in `tokenizer_config.json` by their roles, such as "bos"."""
    return {role.removesuffix("_token"): _name_of(options[role]) for role in ROLES if options.get(role)}


def add_tokens(library: hf.Tokenizer, declared: Tokens, options: Settings, sentinels: Sequence[str] = ()) -> None:
    """Adds declared tokens, the special tokens that `options` name, as in tokenizer_config.json, and sentinels."""
    named = _tokens_by_role(options)
    for token in named:
        token.special = True
    roles = {token.content for token in named}
    tokens = [declared[i] for i in sorted(declared)]
    for token in tokens:
        token.special = token.special or token.content in roles
    present = {token.content for token in (*library.get_added_tokens_decoder().values(), *tokens)}
    tokens += [token for token in (*named, *_extra_tokens(options, sentinels)) if token.content not in present]
    library.add_tokens(tokens)


def _tokens_by_role(options: Settings) -> list[hf.AddedToken]:
    """Returns the special tokens with a role, also those with a role of one model, such as `image_token`."""
    others = [name for name in options if name.endswith("_token") and name not in ROLES]
    tokens = [options.get(name) for name in (*ROLES, *others)]
    more = options.get("extra_special_tokens")
    tokens += more.values() if isinstance(more, dict) else []
    return [_make_token(value) for value in tokens if value and isinstance(value, str | dict)]


def _extra_tokens(options: Settings, sentinels: Sequence[str] = ()) -> list[hf.AddedToken]:
    more = options.get("extra_special_tokens")
    if not isinstance(more, list):
        more = list(options.get("additional_special_tokens") or ())
        more += [] if {_make_token(value).content for value in more} & {*sentinels} else sentinels
    return [_make_token(value) for value in more]


def _read_special_tokens_map(folder: Path, options: Settings) -> Settings:
    listed = read_json(folder / "special_tokens_map.json", {})
    is_token = {name: isinstance(value, dict) and name != "extra_special_tokens" for name, value in listed.items()}
    listed = {name: value | {"special": True} if is_token[name] else value for name, value in listed.items()}
    more, own = listed.get("extra_special_tokens"), options.get("extra_special_tokens")
    if isinstance(more, list) and isinstance(own, list):
        listed["extra_special_tokens"] = [*own, *(token for token in more if token not in own)]
    return listed


def _read_added_tokens(folder: Path, options: Settings) -> Tokens:
    special = {*names_by_role(options).values()}
    more = options.get("extra_special_tokens")
    special |= {_make_token(value).content for value in more} if isinstance(more, list) else set()
    listed: Mapping[str, int] = read_json(folder / "added_tokens.json", {})
    return {
        i: hf.AddedToken(name, normalized=name not in special, special=name in special) for name, i in listed.items()
    }


def _make_token(value: Any) -> hf.AddedToken:
    """Returns a token from its fields, or a special one from its name."""
    if not isinstance(value, dict):
        return hf.AddedToken(str(value), special=True)
    return hf.AddedToken(**{name: field for name, field in value.items() if name != "__type"})


def rebuilding_class(tokenizer: hf.Tokenizer, model_type: str, options: Settings) -> str:
    """Returns the class of transformers 5 that rebuilds a tokenizer from its vocabulary; "" if none does.

    A byte-level BPE that is declared as LlamaTokenizer is read as it is.
    """
    code = options.get("auto_map")
    by_type = not (code.get("AutoTokenizer") if isinstance(code, Mapping) else code)
    if by_type and model_type in REBUILT:
        return REBUILT[model_type]
    kind = (options.get("tokenizer_class") or DEFAULT_CLASSES.get(model_type, "")).removesuffix("Fast")
    kind = SYNONYMS.get(kind, kind)
    if (by_type and model_type in WITHOUT_CLASS) or kind not in BUILDERS:
        return ""
    if kind in LLAMAS:
        return kind if _is_character_bpe(tokenizer) else ""
    return kind if isinstance(tokenizer.model, MODELS.get(kind, hf.models.BPE)) else ""


def surround_texts(
    library: hf.Tokenizer, before: list[str], after: list[str], pair: Sequence[str] = ("$A:0", "$B:1")
) -> None:
    """Puts special tokens around the texts of a tokenizer, and joins pairs of texts as the template `pair` says."""
    ids = [(name, library.token_to_id(name)) for name in dict.fromkeys((*before, *after))]
    library.post_processor = hf.processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=list(pair), special_tokens=ids
    )


def _name_of(token: Any) -> str:
    """Returns the name of a token that is given by its name or its fields."""
    return token["content"] if isinstance(token, dict) else str(token)


def _as_bert(tokenizer: hf.Tokenizer, options: Settings) -> None:
    tokenizer.normalizer = hf.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = hf.decoders.WordPiece(prefix="##")


def _as_qwen(tokenizer: hf.Tokenizer, options: Settings, pattern: str) -> None:
    """Replaces the parts of a BPE that Qwen's classes build themselves, with their pre-tokenization pattern.

    Raises:
        UserError: the tokenizer is no BPE.
    """
    if not isinstance(tokenizer.model, hf.models.BPE):
        raise UserError("its tokenizer.json has no BPE, from which transformers would build the tokenizer of Qwen")
    model, steps = tokenizer.model, hf.pre_tokenizers
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = None, None, False, False
    tokenizer.normalizer = hf.normalizers.NFC()
    split = steps.Split(hf.Regex(pattern), "isolated")
    spaced = bool(options.get("add_prefix_space"))
    tokenizer.pre_tokenizer = steps.Sequence([split, steps.ByteLevel(add_prefix_space=spaced, use_regex=False)])
    tokenizer.decoder = hf.decoders.ByteLevel()


def _as_gpt2(tokenizer: hf.Tokenizer, options: Settings) -> None:
    model = tokenizer.model
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = None, None, False, False
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=bool(options.get("add_prefix_space")))
    tokenizer.decoder = hf.decoders.ByteLevel()


def _as_xlm_roberta(tokenizer: hf.Tokenizer, options: Settings) -> None:
    tokenizer.normalizer = next(iter(_find_charsmap(tokenizer)), None)
    _set_metaspace(tokenizer, split_words=True, spaced=options.get("add_prefix_space", True))


def _as_albert(tokenizer: hf.Tokenizer, options: Settings) -> None:
    parts = hf.normalizers
    steps: list[Any] = [parts.Replace("``", '"'), parts.Replace("''", '"')]
    steps += [] if options.get("keep_accents") else [parts.NFKD(), parts.StripAccents()]
    steps += [parts.Lowercase()] if options.get("do_lower_case", True) else []
    tokenizer.normalizer = parts.Sequence([*steps, *_find_charsmap(tokenizer)])
    _set_metaspace(tokenizer, split_words=True, spaced=options.get("add_prefix_space", True))


def _set_metaspace(tokenizer: hf.Tokenizer, *, split_words: bool = False, spaced: bool | None = True) -> None:
    scheme, words = "always" if spaced else "never", hf.pre_tokenizers.WhitespaceSplit()
    marked = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([words, marked]) if split_words else marked
    tokenizer.decoder = hf.decoders.Metaspace(prepend_scheme=scheme)


def _as_mbart(tokenizer: hf.Tokenizer, options: Settings) -> None:
    tokenizer.normalizer = None
    _set_metaspace(tokenizer, split_words=True)


def _as_mbart50(tokenizer: hf.Tokenizer, options: Settings) -> None:
    charsmap, spaces = _find_charsmap(tokenizer), hf.normalizers.Replace(hf.Regex(" {2,}"), " ")
    tokenizer.normalizer = hf.normalizers.Sequence([*charsmap, spaces])
    _set_metaspace(tokenizer)


def _as_nllb(tokenizer: hf.Tokenizer, options: Settings) -> None:
    if options.get("legacy_behaviour"):
        raise UserError("legacy_behaviour=True, language tags after the end of sources, is not supported")
    model, charsmap = tokenizer.model, _find_charsmap(tokenizer)
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = "<unk>", None, True, False
    spaces = hf.normalizers.Replace(hf.Regex(" {2,}"), " ")
    tokenizer.normalizer = hf.normalizers.Sequence([*charsmap, spaces]) if charsmap else None
    _set_metaspace(tokenizer)


def _find_charsmap(tokenizer: hf.Tokenizer) -> list[Any]:
    """Returns the first normalizer of SentencePiece in a tokenizer; []: it has none."""
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    steps = (step.get("precompiled_charsmap") for step in normalizer.get("normalizers", [normalizer]))
    return [hf.normalizers.Precompiled(base64.b64decode(charsmap)) for charsmap in filter(None, steps)][:1]


def _as_gemma(tokenizer: hf.Tokenizer, options: Settings) -> None:
    model, unknown = tokenizer.model, _name_of(options.get("unk_token", "<unk>"))
    model.unk_token, model.dropout, model.fuse_unk, model.byte_fallback = unknown, None, True, True
    tokenizer.normalizer = hf.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _piece_decoder()


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
    tokenizer.decoder = _piece_decoder(*([hf.decoders.Strip(" ", 1, 0)] if spaced else []))


def _as_code_llama(tokenizer: hf.Tokenizer, options: Settings) -> None:
    _as_llama(tokenizer, options | {"legacy": False})
    tokenizer.model.unk_token = _name_of(options.get("unk_token", "<unk>"))
    tokenizer.decoder = _piece_decoder(hf.decoders.Strip(" ", 1, 0))


def _piece_decoder(*last: Any) -> hf.decoders.Decoder:
    parts = hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()
    return hf.decoders.Sequence([*parts, *last])


UNIGRAMS = ("AlbertTokenizer", "T5Tokenizer", "MBartTokenizer", "MBart50Tokenizer", "XLMRobertaTokenizer")
MODELS: dict[str, type] = {"BertTokenizer": hf.models.WordPiece, **dict.fromkeys(UNIGRAMS, hf.models.Unigram)}
"""Model that a class rebuilds; others rebuild a BPE."""
BUILDERS: dict[str, Callable[[hf.Tokenizer, Settings], None]] = {
    "AlbertTokenizer": _as_albert,
    "BartTokenizer": _as_gpt2,
    "BertTokenizer": _as_bert,
    "CodeLlamaTokenizer": _as_code_llama,
    "GPT2Tokenizer": _as_gpt2,
    "GemmaTokenizer": _as_gemma,
    "LlamaTokenizer": _as_llama,
    "MBartTokenizer": _as_mbart,
    "MBart50Tokenizer": _as_mbart50,
    "NllbTokenizer": _as_nllb,
    "Qwen2Tokenizer": functools.partial(_as_qwen, pattern=QWEN2_PATTERN),
    "Qwen3_5Tokenizer": functools.partial(_as_qwen, pattern=QWEN3_5_PATTERN),
    "RobertaTokenizer": _as_gpt2,
    "T5Tokenizer": lambda tokenizer, options: _as_xlm_roberta(tokenizer, {}),
    "XLMRobertaTokenizer": _as_xlm_roberta,
}
"""Functions that replace the parts of a tokenizer that a class builds itself."""
