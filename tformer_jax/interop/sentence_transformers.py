"""Reads what sentence-transformers does after the model of a folder: pooling, normalization, lengths and prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.json_files import read_json
from tformer_jax.config import EmbedConfig
from tformer_jax.data.tokenizers import Tokenizer

MODULES = "modules.json"
SETTINGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
POOLINGS = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
"""Our poolings by theirs."""
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Their poolings by the fields of earlier versions."""


def read_embedding(folder: Path, tokenizer: Tokenizer, max_length: int) -> EmbedConfig:
    """Returns how the texts of a folder are embedded; without modules.json, the defaults.

    Args:
        max_length: maximum number of tokens of the model.

    Raises:
        UserError: a file is damaged, or has a module or setting that this package does not have.
    """
    if not (folder / MODULES).is_file():
        return EmbedConfig()
    modules = _read_modules(folder)
    try:
        return EmbedConfig(
            **_read_settings(folder, modules), **_read_length(folder, tokenizer, max_length), **_read_prompts(folder)
        )
    except (AttributeError, TypeError) as error:
        problem = f"a setting of sentence-transformers has the wrong type ({first_line(error, 200)})"
        raise UserError(f"{folder}: {problem}; correct it, or remove {MODULES}") from error


def _read_settings(folder: Path, modules: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the pooling and the normalization of the modules."""
    settings: dict[str, Any] = {"normalize": False}
    for kind, path in modules[1:]:
        if kind == "Normalize":
            settings["normalize"] = True
        elif kind == "Pooling" and "pooling" not in settings and not settings["normalize"]:
            settings["pooling"] = _read_pooling(folder / path)
        else:
            raise _unsupported_error(folder, f"the module {kind}")
    return settings


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Returns the type and the folder of each module."""
    path = folder / MODULES
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        modules = [(module["type"].rpartition(".")[2], module["path"]) for module in listed]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise UserError(f"{path} is not a list of modules of sentence-transformers: remove it") from None
    if not modules or modules[0] != ("Transformer", ""):
        raise _unsupported_error(folder, f"{modules[0] if modules else 'no module'} as the first module")
    return modules


def _read_pooling(folder: Path) -> str:
    config = read_json(folder / "config.json")
    modes = config.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if config.get(flag)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise _unsupported_error(folder.parent, f"the pooling {' with '.join(map(str, modes))}")
    if config.get("include_prompt") is False:
        raise _unsupported_error(folder.parent, "include_prompt=False")
    return POOLINGS[modes[0]]


def _read_length(folder: Path, tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """Returns the maximum length: of the settings of the model, or else of its tokenizer."""
    files = [folder / name for name in SETTINGS if (folder / name).is_file()]
    settings = read_json(files[0]) if files else {}
    text = "Ab Äß"
    if settings.get("do_lower_case") and tokenizer.encode(text) != tokenizer.encode(text.lower()):
        raise _unsupported_error(
            folder, f"do_lower_case=True in {files[0].name} with a tokenizer of upper-case letters"
        )
    limit = settings.get("max_seq_length") or read_json(folder / "tokenizer_config.json", {}).get("model_max_length")
    if limit and limit < max_length and not isinstance(limit, int):
        raise TypeError(f"a maximum length of {limit!r} tokens")
    return {"max_length": limit} if limit and limit < max_length else {}


def _read_prompts(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config_sentence_transformers.json", {})
    prompts = config.get("prompts") or {}
    texts = tuple(f"{name}={text}" for name, text in prompts.items())
    return {"prompts": texts, "prompt": config.get("default_prompt_name") or ""}


def _unsupported_error(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder / MODULES}: {what} of sentence-transformers is not supported: remove {MODULES} to import the model "
        "alone"
    )
