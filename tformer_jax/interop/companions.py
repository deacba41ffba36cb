"""Files and fields of a checkpoint folder that this package does not use itself, and that an export writes again.

They are chat templates, sentence-transformers' modules, and how other programs cut and pad texts.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import read_json
from tformer_jax.data.chat.template import TEMPLATE_FILE, ChatTemplate
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.classes import class_fields
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.special_tokens import SpecialTokens

FILES = (
    *(TEMPLATE_FILE, "modules.json", "config_sentence_transformers.json"),
    *("sentence_*_config.json", "*_Pooling/config.json", "*_Normalize/config.json"),
    "additional_chat_templates/*.jinja",
)
"""Patterns of files that are copied as they are."""
FIELDS = (
    *("model_max_length", "chat_template", "padding_side", "truncation_side", "cls_token", "sep_token"),
    *("model_input_names", "src_lang", "tgt_lang", "do_lower_case"),
)
"""Fields of tokenizer_config.json that are copied."""
FORCED_LANGUAGE = "forced_language"
"""Key of the language whose tag `forced_bos_token_id` of a checkpoint is."""
HEAD_FIELDS = (
    *("cls_token_id", "sep_token_id", "classifier_pooling", "decoder_bias", "qa_dropout", "seq_classif_dropout"),
    *("classifier_dropout", "classifier_dropout_prob"),
)
"""Fields of config.json about heads that a run may lack, and that transformers may add to its export."""


def read(folder: Path, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Returns the text of each file by its relative path under "files", and fields of two files under their names.

    Args:
        tokenizer: the tokenizer of the folder, whose class decides on fields that no file has.
    """
    paths = sorted(path for pattern in FILES for path in folder.glob(pattern))
    files = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    options = read_json(folder / "tokenizer_config.json", {})
    options = _class_fields(folder, tokenizer, options) | options
    theirs = read_json(folder / "config.json", {})
    return {
        "files": files,
        "tokenizer_config": {name: options[name] for name in FIELDS if name in options},
        "config": {name: theirs[name] for name in HEAD_FIELDS if name in theirs},
    }


def _class_fields(folder: Path, tokenizer: Tokenizer | None, options: dict[str, Any]) -> dict[str, Any]:
    """Returns fields of the class of a tokenizer, with the names of special_tokens_map.json."""
    if not isinstance(tokenizer, HFTokenizer):
        return {}
    model_type = read_json(folder / "config.json").get("model_type", "")
    fields = class_fields(tokenizer.backend_tokenizer, model_type, options)
    named = read_json(folder / "special_tokens_map.json", {})
    return fields | {name: named[name] for name in ("cls_token", "sep_token") if name in named}


def head_fields(companions: dict[str, Any], special: SpecialTokens) -> dict[str, Any]:
    """Returns the fields of config.json that `read` returned, with the ids of `special`, which may have changed."""
    fields = companions.get("config", {})
    around = {"cls_token_id": special.before[:1], "sep_token_id": special.after[-1:]}
    return fields | {name: ids[0] for name, ids in around.items() if ids and name in fields}


def write(folder: Path, companions: dict[str, Any], max_length: int, chat: ChatTemplate | None = None) -> None:
    """Writes what `read` returned into an exported folder.

    Args:
        max_length: number of tokens that the model reads, for a tokenizer whose length is not among `companions`.
        chat: chat template and its special tokens; replaces the template in `companions`.

    Raises:
        UserError: a name matches no pattern of `FILES`; it could be a path outside the folder.
    """
    template = {TEMPLATE_FILE: chat.text} if chat else {}
    for name, text in (companions.get("files", {}) | template).items():
        if not _is_companion(PurePosixPath(name)):
            raise UserError(f"imported.json of the run names the file {name!r}, which is not written: remove it there")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    path = folder / "tokenizer_config.json"
    if path.is_file():
        given = companions.get("tokenizer_config", {"model_max_length": max_length})
        given = {name: value for name, value in given.items() if not (chat and name == "chat_template")}
        tokens = dict(chat.tokens) if chat else {}
        path.write_text(json.dumps(given | read_json(path) | tokens, indent=2) + "\n", encoding="utf-8")


def remove_modules(folder: Path, companions: dict[str, Any]) -> None:
    """Removes sentence-transformers' files that `write` has written."""
    for name in companions.get("files", {}):
        if "template" not in name:
            (folder / name).unlink()


def _is_companion(path: PurePosixPath) -> bool:
    """Returns whether a relative path matches a pattern of `FILES`, part by part."""
    return any(path.match(pattern) and len(path.parts) == pattern.count("/") + 1 for pattern in FILES)
