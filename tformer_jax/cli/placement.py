"""Where a config would put its state and its batches, found by tracing shapes; nothing is computed or compiled."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, PartitionSpec

from tformer_jax.config import Config, ConfigError, ModelConfig
from tformer_jax.data.bucketing import bucket_sizes
from tformer_jax.models import cost, registry
from tformer_jax.parallel.mesh import BATCH_AXES
from tformer_jax.train import optimizers, state

LINEAR = "blockwise"
"""The backend whose memory stands for that of one that this machine lacks."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters of the same name and shape, in `count` layers."""

    name: str
    count: int
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    spec: PartitionSpec
    device_bytes: int
    """Of all of them, on one device."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """What one device holds, and what a checkpoint holds, in bytes."""

    groups: tuple[Group, ...]
    parameters: int
    optimizer: int
    mean: int
    """The running mean of the parameters, where there is one."""
    gradients: int
    activations: int
    """What the backward pass of one part of the batch needs, as traced; XLA may keep less."""
    checkpoint: int
    """The whole state."""
    rows: int
    """Of one batch on one device, of the longest bucket where there are buckets; `train.accumulate` parts together."""
    length: int
    """Tokens of such a row on one device."""

    @property
    def state(self) -> int:
        """What a device holds all the time."""
        return self.parameters + self.optimizer + self.mean

    @property
    def total(self) -> int:
        """What a device holds at most."""
        return self.state + self.gradients + self.activations


def of(cfg: Config, sizes: Mapping[str, int]) -> Placement:
    """The placement of a config on a mesh with axes of such sizes, which fits it (`rules.check`, `check_divisible`).

    Args:
        cfg: vocabularies and the number of classes are filled in.

    Raises:
        ConfigError: the model or the optimizer cannot be built.
    """
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    model = registry.build(cfg.model)
    boxed = registry.shapes(model)
    placed = state.abstract(model, optimizers.build(cfg, boxed), cfg, mesh)
    parameters = _device_bytes(placed.params)
    accumulated = parameters * 4 // jax.numpy.dtype(cfg.model.param_dtype).itemsize if cfg.train.accumulate > 1 else 0
    rows, length = _batch(cfg, sizes)
    return Placement(
        groups=tuple(_groups(boxed, placed.params)),
        parameters=parameters,
        optimizer=_device_bytes(placed.opt_state),
        mean=_device_bytes(placed.ema),
        gradients=parameters + accumulated,
        activations=cost.activation_bytes(
            _share(cfg.model, sizes), max(rows // cfg.train.accumulate, 1), length, chunk=cfg.train.loss_chunk
        ),
        checkpoint=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(placed)),
        rows=rows,
        length=length,
    )


def on_any_machine(cfg: ModelConfig) -> ModelConfig:
    """The model as this machine can trace it: with another backend of attention, where it lacks that of the config."""
    try:
        registry.build(cfg)
    except ConfigError:
        return dataclasses.replace(cfg, attention_backend=LINEAR)
    return cfg


def _groups(boxed: Any, params: Any) -> Iterator[Group]:
    boxes = jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    found: dict[tuple[Any, ...], list[Any]] = {}
    for box, (path, leaf) in zip(boxes, jax.tree_util.tree_leaves_with_path(params), strict=True):
        name = re.sub(r"layers_\d+", "layers_*", "/".join(str(key.key) for key in path))
        found.setdefault((name, leaf.shape, getattr(box, "names", ())), []).append(leaf)
    for (name, shape, axes), leaves in found.items():
        yield Group(name, len(leaves), shape, axes, leaves[0].sharding.spec, _device_bytes(leaves))


def _device_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _batch(cfg: Config, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Rows and tokens of a row of a batch on one device."""
    if cfg.data.batching == "buckets":
        length = cfg.data.longest
        rows = bucket_sizes(cfg.data)[length]
    else:
        rows, length = cfg.data.batch_size, cfg.data.longest
    return rows // math.prod(sizes[axis] for axis in BATCH_AXES), length // sizes["sequence"]


def _share(cfg: ModelConfig, sizes: Mapping[str, int]) -> ModelConfig:
    """A model whose activations are those that one of the devices along `tensor` holds."""
    tensor = sizes["tensor"]
    if tensor == 1:
        return cfg
    kv_heads = cfg.kv_heads // tensor if cfg.kv_heads % tensor == 0 else cfg.num_heads // tensor
    share: dict[str, Any] = {
        "head_dim": cfg.head_size,
        "num_heads": cfg.num_heads // tensor,
        "num_kv_heads": kv_heads,
        "ffn_dim": cfg.ffn_dim // tensor,
    }
    for name in ("vocab_size", "source_vocab_size"):
        size = getattr(cfg, name)
        if size is not None and size % tensor == 0:
            share[name] = size // tensor
    return dataclasses.replace(cfg, **share)
