"""Loads PyTorch state dicts of nanoGPT, of fairseq and of models built from `torch.nn.Transformer`.

The file is one of `torch.save`: a state dict, or a dictionary with one under "model" or "state_dict", and perhaps with
"model_args". It is read by `torch.load(..., weights_only=True)`, which creates tensors and plain values only.
"""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.interop import fairseq, mapping, nanogpt, torch_files, torch_transformer
from tformer_jax.interop.architecture import Settings
from tformer_jax.interop.files import StoredArrays
from tformer_jax.models import registry

SUFFIXES = (".pt", ".pth")
STATES = ("model", "state_dict", "model_state_dict")
"""Keys of a checkpoint that hold its state dict."""
WRAPPERS = re.compile(r"^(_orig_mod\.|module\.)+")
"""Prefixes of names that `torch.compile` and `DistributedDataParallel` add, in any order."""


class StateDictKind(NamedTuple):
    """Description of the state dicts of one kind of model."""

    has: str
    """Name of an array that only this kind has."""
    settings: Callable[[StoredArrays, Settings], Settings]
    """Arrays and model_args -> our settings; removes arrays that repeat others."""
    rules: tuple[mapping.Rule, ...]
    ignored: tuple[str, ...]
    """Patterns of names of buffers."""


KINDS = {
    "nanoGPT": StateDictKind(nanogpt.HAS, nanogpt.settings, nanogpt.RULES, nanogpt.BUFFERS),
    "fairseq": StateDictKind(fairseq.HAS, fairseq.settings, fairseq.RULES, fairseq.BUFFERS),
    "torch.nn.Transformer": StateDictKind(
        torch_transformer.HAS, torch_transformer.settings, torch_transformer.RULES, torch_transformer.BUFFERS
    ),
}


def load(
    path: Path, args: Mapping[str, Any], *, mesh: Mesh | None = None, **settings: Any
) -> tuple[str, ModelConfig, Any]:
    """Returns the kind of model, and its config and parameters; arrays are read, converted and placed one by one.

    Args:
        args: values of model_args, which replace the file's.
        mesh: mesh that holds the parameters; None: the default device.
        settings: override the config (dtype, attention_backend, ...).

    Raises:
        UserError: the file is damaged, holds other objects than tensors, or its arrays fit no kind of model.
    """
    arrays, given = read(path)
    names = [name for name, layout in KINDS.items() if layout.has in arrays]
    if not names:
        arrays_of_kinds = " or ".join(f"{layout.has!r} ({name})" for name, layout in KINDS.items())
        raise UserError(f"{path} is a state dict of another model: it has no array {arrays_of_kinds}")
    layout = KINDS[names[0]]
    cfg = ModelConfig(**layout.settings(arrays, {**given, **args}) | settings)
    model = registry.build(cfg)
    shapes = nn.unbox(registry.shapes(model)) if mesh is None else registry.sharded_shapes(model, mesh)
    return names[0], cfg, mapping.to_ours(layout.rules, arrays, shapes, ignored=layout.ignored)


def read(path: Path) -> tuple[StoredArrays, Settings]:
    """Opens a file of `torch.save`, and returns its arrays and its model_args.

    Attention's stacked `in_proj_weight` and `in_proj_bias` are split into `q_proj`, `k_proj` and `v_proj`.
    """
    content = torch_files.load(path)
    content = content if isinstance(content, dict) else {}
    state = next((content[key] for key in STATES if isinstance(content.get(key), dict)), content)
    tensors = {WRAPPERS.sub("", name): value for name, value in torch_files.tensors_of(state).items()}
    if not tensors:
        raise UserError(f"{path} has no state dict, neither as a whole nor under one of {', '.join(STATES)}")
    args = content.get("model_args") or fairseq.read_arguments(content.get("cfg"))
    return StoredArrays(_array_readers(tensors)), args if isinstance(args, dict) else {}


def _array_readers(tensors: dict[str, Any]) -> dict[str, Callable[[], np.ndarray]]:
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for name, tensor in tensors.items():
        stem, stacked, leaf = name.rpartition("in_proj_")
        if stacked and (not tensor.ndim or len(tensor) % 3):
            raise UserError(f"{name} has the shape {tuple(tensor.shape)}, which cannot be split into three projections")
        parts = [f"{stem}{side}_proj.{leaf}" for side in "qkv"] if stacked else [name]
        for part, values in zip(parts, tensor.chunk(3) if stacked else [tensor], strict=True):
            readers[part] = functools.partial(torch_files.to_numpy, values, part)
    return readers
