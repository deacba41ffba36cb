"""Where a config would put its state and its batches, found by tracing shapes; nothing is computed or compiled."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, PartitionSpec

from tformer_jax.config import Config
from tformer_jax.data.bucketing import bucket_sizes
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import data_parallelism
from tformer_jax.train import optimizers, state

FLOAT32 = 4


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
    """An estimate: as many as parameters, and their float32 sums where a batch has parts."""
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


def of(cfg: Config, sizes: Mapping[str, int]) -> Placement:
    """The placement of a config on a mesh with axes of such sizes, which fits it (`rules.check`, `check_divisible`).

    Args:
        cfg: vocabularies and the number of classes are filled in.

    Raises:
        ConfigError: the model or the optimizer cannot be built.
    """
    rows, length = _batch(cfg)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, attention_backend="reference"))  # runs anywhere
    model = registry.build(cfg.model)
    boxed = registry.shapes(model)
    placed = state.abstract(model, optimizers.build(cfg, boxed), cfg, mesh)
    parameters, parts = _device_bytes(placed.params), cfg.train.accumulate
    numbers = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(placed.params))
    return Placement(
        groups=tuple(_groups(boxed, placed.params)),
        parameters=parameters,
        optimizer=_device_bytes(placed.opt_state),
        mean=_device_bytes(placed.ema),
        gradients=parameters + (FLOAT32 * numbers if parts > 1 else 0),
        checkpoint=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(placed)),
        rows=rows // data_parallelism(mesh),
        length=length // sizes["sequence"],
    )


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


def _batch(cfg: Config) -> tuple[int, int]:
    """Rows and tokens of a row of a batch."""
    length = cfg.data.longest
    return (bucket_sizes(cfg.data)[length] if cfg.data.batching == "buckets" else cfg.data.batch_size), length
