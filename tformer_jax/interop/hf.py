"""Folders in Hugging Face's format: `config.json` and `model.safetensors` (or its shards).

Only safetensors files are read: they hold arrays and nothing that runs.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.interop import mapping
from tformer_jax.interop.architecture import Architecture
from tformer_jax.interop.decoders import DECODERS
from tformer_jax.interop.encoders import ENCODERS
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD

ARCHITECTURES: dict[str, Architecture] = DECODERS | ENCODERS
"""By `model_type` of config.json."""

TOKEN_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}


def load(folder: Path, **settings: Any) -> tuple[ModelConfig, Any]:
    """The config and parameters of a checkpoint; `settings` change the config (dtype, attention_backend, ...).

    Raises:
        ConfigError: the folder is no checkpoint, is of an unknown kind, or does not fit its own config.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: name a folder that Hugging Face's save_pretrained wrote")
    hf = json.loads(path.read_text(encoding="utf-8"))
    architecture = _architecture(str(hf.get("model_type")))
    arrays = _with_prefix(_read_arrays(folder), architecture)
    theirs = architecture.settings(hf)
    cfg = ModelConfig(**theirs | {"tie_embeddings": _tied(theirs["family"], arrays, architecture)} | settings)
    shapes = jax.eval_shape(lambda: nn.unbox(registry.init(registry.build(cfg), jax.random.key(0))))
    return cfg, mapping.to_ours(architecture.rules(cfg), arrays, shapes, ignored=architecture.ignored)


def save(folder: Path, model_type: str, cfg: ModelConfig, params: Any, **theirs: Any) -> None:
    """Writes a checkpoint that transformers reads as `model_type`; the folder is made where it is missing.

    `theirs` adds to config.json or changes it, such as token ids other than those of `special_tokens`.

    Raises:
        ConfigError: the architecture has no place for something in `params`.
    """
    from safetensors.numpy import save_file

    architecture = _architecture(model_type)
    arrays = mapping.to_theirs(architecture.rules(cfg), params)
    folder.mkdir(parents=True, exist_ok=True)
    hf = {"model_type": model_type, "architectures": [architecture.name], "dtype": cfg.param_dtype}
    config = json.dumps(hf | TOKEN_IDS | architecture.config(cfg) | theirs, indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def _architecture(model_type: str) -> Architecture:
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"model_type {model_type!r} is not here; known are {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[model_type]


def _tied(family: str, arrays: dict[str, Any], architecture: Architecture) -> str:
    """What of the embeddings is one matrix; arrays that only repeat the embedding are taken out of `arrays`."""
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


def _with_prefix(arrays: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """GPT-2's first checkpoints leave out the `transformer.` in front of all names."""
    if architecture.name == "GPT2LMHeadModel" and "wte.weight" in arrays:
        return {f"transformer.{name}": array for name, array in arrays.items()}
    return arrays


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
