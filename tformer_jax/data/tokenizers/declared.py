"""Tokens that the JSON files beside a tokenizer add to it, with the ids and rules that transformers 5 gives them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf

from tformer_jax.data.tokenizers.added import SENTINEL
from tformer_jax.data.tokenizers.json_files import Settings, read_json

Tokens = dict[int, hf.AddedToken]

ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BART = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
CLASS_ROLES: dict[str, dict[str, str]] = {
    "BartTokenizer": _BART,
    "BertTokenizer": {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    "GemmaTokenizer": {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
    "GPT2Tokenizer": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>"),
    "RobertaTokenizer": _BART,
    "T5Tokenizer": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
}
"""Names of special tokens by role that tokenizer classes of transformers 5 have unless others are given."""


def add_declared(tokenizer: hf.Tokenizer, folder: Path, options: Settings, kind: str) -> tuple[hf.Tokenizer, Settings]:
    """Adds the tokens of tokenizer_config.json, added_tokens.json and special_tokens_map.json to a tokenizer.

    The last two are read only if tokenizer_config.json has no `added_tokens_decoder`. Tokens that the tokenizer lacks
    are appended in the order of their ids, which need not be those that the files give.

    Args:
        options: settings of tokenizer_config.json.
        kind: the class of transformers that rebuilds the tokenizer from its vocabulary; "" if it reads the file as is.

    Returns:
        The tokenizer, and `options` with those of special_tokens_map.json.
    """
    own = tokenizer.get_added_tokens_decoder()
    if kind:
        tokenizer = hf.Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": []}))
    options = _defaults(tokenizer, kind) | options
    if options.get("additional_special_tokens") and not options.get("extra_special_tokens"):
        options["extra_special_tokens"] = options.pop("additional_special_tokens")
    listed: dict[str, Any] | None = options.get("added_tokens_decoder")
    if listed is None:
        options |= _special_tokens_map(folder, options)
        declared = _added_tokens(folder, options) | own
    else:
        declared = {int(i): _token(fields) for i, fields in listed.items()}
    _add(tokenizer, declared, options, _sentinels(options) if kind == "T5Tokenizer" else [])
    return tokenizer, options


def _defaults(tokenizer: hf.Tokenizer, kind: str) -> Settings:
    """Returns the special tokens by role unless others are given: those of a class, or with which a file pads."""
    roles = CLASS_ROLES.get(kind, {})
    if kind in ("", "LlamaTokenizer") and tokenizer.padding is not None:
        roles = roles | {"pad": tokenizer.padding["pad_token"]}
    return {f"{role}_token": name for role, name in roles.items()}


def add_named(tokenizer: hf.Tokenizer, options: Settings) -> None:
    """Adds the special tokens that `options` name by role, as in tokenizer_config.json."""
    _add(tokenizer, {}, options, [])


def special_names(options: Settings) -> list[str]:
    """Returns the names of all special tokens in `tokenizer_config.json`."""
    return list(dict.fromkeys(token.content for token in (*_by_role(options), *_extra(options, []))))


def content(token: Any) -> str:
    """Returns the name of a token that is given by its name or its fields."""
    return token["content"] if isinstance(token, dict) else str(token)


def _add(tokenizer: hf.Tokenizer, declared: Tokens, options: Settings, sentinels: list[str]) -> None:
    named = _by_role(options)
    for token in named:
        token.special = True
    roles = {token.content for token in named}
    tokens = [declared[i] for i in sorted(declared)]
    for token in tokens:
        token.special = token.special or token.content in roles
    present = {token.content for token in (*tokenizer.get_added_tokens_decoder().values(), *tokens)}
    tokens += [token for token in (*named, *_extra(options, sentinels)) if token.content not in present]
    tokenizer.add_tokens(tokens)


def _by_role(options: Settings) -> list[hf.AddedToken]:
    """Returns the special tokens with a role, also those with a role of one model, such as `image_token`."""
    others = [name for name in options if name.endswith("_token") and name not in ROLES]
    found = [options.get(name) for name in (*ROLES, *others)]
    more = options.get("extra_special_tokens")
    found += more.values() if isinstance(more, dict) else []
    return [_token(value) for value in found if value and isinstance(value, str | dict)]


def _extra(options: Settings, sentinels: list[str]) -> list[hf.AddedToken]:
    more = options.get("extra_special_tokens")
    if not isinstance(more, list):
        more = list(options.get("additional_special_tokens") or ())
        more += [] if {_token(value).content for value in more} & {*sentinels} else sentinels
    return [_token(value) for value in more]


def _sentinels(options: Settings) -> list[str]:
    return [SENTINEL.format(i) for i in range(options.get("extra_ids", 100))]


def _special_tokens_map(folder: Path, options: Settings) -> Settings:
    found = read_json(folder / "special_tokens_map.json", {})
    is_token = {name: isinstance(value, dict) and name != "extra_special_tokens" for name, value in found.items()}
    found = {name: value | {"special": True} if is_token[name] else value for name, value in found.items()}
    more, own = found.get("extra_special_tokens"), options.get("extra_special_tokens")
    if isinstance(more, list) and isinstance(own, list):
        found["extra_special_tokens"] = [*own, *(token for token in more if token not in own)]
    return found


def _added_tokens(folder: Path, options: Settings) -> Tokens:
    special = {token.content for token in _by_role(options)}
    more = options.get("extra_special_tokens")
    special |= {_token(value).content for value in more} if isinstance(more, list) else set()
    listed: Mapping[str, int] = read_json(folder / "added_tokens.json", {})
    return {
        i: hf.AddedToken(name, normalized=name not in special, special=name in special) for name, i in listed.items()
    }


def _token(value: Any) -> hf.AddedToken:
    """Returns a token from its fields, or a special one from its name."""
    if not isinstance(value, dict):
        return hf.AddedToken(str(value), special=True)
    return hf.AddedToken(**{name: field for name, field in value.items() if name != "__type"})
