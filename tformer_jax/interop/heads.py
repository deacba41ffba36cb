"""Heads that checkpoints of a base model alone lack."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.interop import mapping
from tformer_jax.interop.architecture import Architecture
from tformer_jax.models import registry


class NoHeadError(UserError):
    """A checkpoint has no classification head, or no output head."""


def random_head(
    settings: dict[str, Any], architecture: Architecture, arrays: Collection[str], *, classes: bool
) -> dict[str, np.ndarray]:
    """Returns the layers of a classification head that a checkpoint lacks: random kernels, and norms without effect.

    Args:
        settings: our settings of the model.
        classes: whether the number of classes is given.
    """
    if not classes:
        raise NoHeadError("this checkpoint has no classification head; set num_classes=... to initialize one randomly")
    cfg, draw = ModelConfig(**settings), np.random.default_rng(0)
    shapes = nn.unbox(registry.shapes(registry.build(cfg)))
    layers = {name: shapes[name] for name in ("head", "pooler", "transform", "transform_norm") if name in shapes}
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), layers)
    head = mapping.to_theirs(architecture.rules(cfg), empty)
    for name, array in head.items():
        if array.ndim == 2:
            array[:] = draw.normal(0, cfg.init_std, array.shape)
        elif name.endswith(".weight"):
            array[:] = 1
    return {name: array for name, array in head.items() if name not in arrays}
