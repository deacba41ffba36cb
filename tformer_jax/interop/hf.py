"""Loads and saves folders in Hugging Face's format: `config.json` and `model.safetensors` (or its shards).

Only safetensors files are read, because they hold only arrays and no code.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.interop import exact, mapping
from tformer_jax.interop.architecture import Architecture
from tformer_jax.interop.decoders import DECODERS
from tformer_jax.interop.encoders import ENCODERS
from tformer_jax.interop.published import DEFAULTS
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD

ARCHITECTURES: dict[str, Architecture] = DECODERS | ENCODERS
"""Architectures by `model_type` of config.json."""

TOKEN_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}


def load(folder: Path, **settings: Any) -> tuple[ModelConfig, Any]:
    """Loads the config and parameters of a checkpoint; `settings` override the config (dtype, attention_backend, ...).

    A classifier's checkpoint without a classification head gets a random one if `num_classes` is in `settings`.

    Raises:
        ConfigError: the folder is not a checkpoint, its architecture is unknown, or its arrays do not match its config.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: name a folder that Hugging Face's save_pretrained wrote")
    hf = json.loads(path.read_text(encoding="utf-8"))
    architecture = _architecture(str(hf.get("model_type")))
    arrays = _named(_read_arrays(folder), architecture)
    read = _settings(hf, arrays, architecture)
    if read["family"] == "classifier" and "classifier.weight" not in arrays:
        arrays |= _fresh_head(read, settings)
    cfg = ModelConfig(**read | settings)
    shapes = jax.eval_shape(lambda: nn.unbox(registry.init(registry.build(cfg), jax.random.key(0))))
    return cfg, mapping.to_ours(architecture.rules(cfg), arrays, shapes, ignored=architecture.ignored)


def save(folder: Path, model_type: str, cfg: ModelConfig, params: Any, **theirs: Any) -> None:
    """Saves a checkpoint that transformers loads as `model_type`; creates the folder if it is missing.

    `theirs` adds or overrides settings of config.json, such as token ids other than those of `special_tokens`.

    Raises:
        ConfigError: the architecture cannot express `cfg` or `params` exactly.
    """
    from safetensors.numpy import save_file

    architecture = _architecture(model_type)
    arrays = mapping.to_theirs(architecture.rules(cfg), params)
    hf = {"model_type": model_type, "architectures": [architecture.name], "dtype": cfg.param_dtype}
    hf |= TOKEN_IDS | architecture.config(cfg) | theirs
    _check_exact(cfg, hf, arrays, architecture)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def _architecture(model_type: str) -> Architecture:
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type]


def _settings(hf: dict[str, Any], arrays: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Returns our settings from their config.json and arrays; removes copies of the embedding from `arrays`."""
    read = architecture.settings(DEFAULTS[hf["model_type"]] | hf)
    untied = read["family"] != "classifier" and hf.get("tie_word_embeddings") is False
    if untied and "lm_head.weight" not in arrays:
        raise ConfigError("this checkpoint cannot be read: tie_word_embeddings=False, but it has no lm_head.weight")
    read["tie_embeddings"] = _tied(read["family"], arrays, architecture)
    read["output_bias"] = "final_logits_bias" in arrays
    return read


def _check_exact(cfg: ModelConfig, hf: dict[str, Any], arrays: dict[str, Any], architecture: Architecture) -> None:
    """Raises `ConfigError` unless loading the written checkpoint would give the same model."""
    try:
        back = ModelConfig(**_settings(hf, dict(arrays), architecture))
    except ConfigError as error:
        raise ConfigError(f"model_type {hf['model_type']!r} cannot hold this model: {error}") from error
    if different := exact.differences(cfg, back):
        raise ConfigError(
            f"model_type {hf['model_type']!r} cannot hold this model, but would be read as another one than that of "
            f"{', '.join(different)}"
        )


def _tied(family: str, arrays: dict[str, Any], architecture: Architecture) -> str:
    """Returns `tie_embeddings`, and removes copies of the embedding from `arrays`."""
    for name in architecture.copies:
        if name in arrays and not _equal(arrays, name, architecture.shared):
            raise ConfigError(f"this checkpoint cannot be read: {name} differs from {architecture.shared}")
        arrays.pop(name, None)
    if family == "classifier":
        return "none"
    own_head = "lm_head.weight" in arrays and not _equal(arrays, "lm_head.weight", architecture.shared)
    if not own_head:
        arrays.pop("lm_head.weight", None)
    if family == "seq2seq":
        return "inputs" if own_head else "all"
    return "none" if own_head else "output"


def _equal(arrays: dict[str, Any], name: str, other: str) -> bool:
    return other in arrays and np.array_equal(arrays[name], arrays[other])


HEADS = ("lm_head.", "classifier.", "cls.", "final_logits_bias")
"""Name prefixes of arrays outside of the base model."""


def _named(arrays: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Renames gamma and beta of early checkpoints, and adds the prefix that checkpoints of a base model omit."""
    names = {name: re.sub(r"LayerNorm\.(gamma|beta)$", _renamed, name) for name in arrays}
    if not any(name.startswith(architecture.prefix) for name in names.values()):
        names = {old: new if new.startswith(HEADS) else architecture.prefix + new for old, new in names.items()}
    return {names[name]: array for name, array in arrays.items()}


def _renamed(match: re.Match[str]) -> str:
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[match[1]]


def _fresh_head(read: dict[str, Any], settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns a random classification head for a checkpoint without one."""
    if "num_classes" not in settings:
        raise ConfigError("this checkpoint has no classification head; give num_classes=... to start a random one")
    size = settings["num_classes"], read["dim"]
    weight = np.random.default_rng(0).normal(0, read["init_std"], size).astype(np.float32)
    return {"classifier.weight": weight, "classifier.bias": np.zeros(size[0], np.float32)}


def _read_arrays(folder: Path) -> dict[str, Any]:
    try:
        from safetensors.flax import load_file
    except ImportError as error:
        raise ConfigError("reading checkpoints needs safetensors: pip install 'tformer_jax[interop]'") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no .safetensors file; checkpoints in other formats are not read")
    arrays: dict[str, Any] = {}
    for file in files:
        try:
            arrays |= load_file(file)
        except Exception as error:
            raise ConfigError(f"{file} is damaged: {error}") from error
    return arrays
