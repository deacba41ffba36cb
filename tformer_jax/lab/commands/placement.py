"""Placement of the state and the batches of a config, by tracing shapes; nothing is computed or compiled."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.meta import is_axis_metadata
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tformer_jax.config import Config
from tformer_jax.data.rows import bucket_sizes
from tformer_jax.models import cost, registry
from tformer_jax.nn.module import named_leaves
from tformer_jax.parallel.mesh import data_parallelism
from tformer_jax.train import optimizers, state
from tformer_jax.train.parameters import base, trainable

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters with the same name and shape, in `count` layers."""

    name: str
    count: int
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    spec: PartitionSpec
    device_bytes: int
    """Bytes of all of them on one device."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Bytes that one device holds, and bytes of a checkpoint."""

    groups: tuple[Group, ...]
    parameters: int
    optimizer: int
    mean: int
    """Exponential moving average of the parameters, if there is one."""
    gradients: int
    """Estimate: as much as the parameters, plus float32 sums if gradients are accumulated."""
    activations: int
    """Lower estimate: the input of each layer, and the logits unless `train.loss_chunk` is set."""
    checkpoint: int
    """The complete state."""
    rows: int
    """Rows of a batch on one device, of the longest bucket if there are buckets, in all micro-batches together."""
    length: int
    """Tokens of a row on one device."""

    @property
    def state(self) -> int:
        """The bytes that a device holds permanently."""
        return self.parameters + self.optimizer + self.mean


def estimate_placement(cfg: Config, sizes: Mapping[str, int]) -> Placement:
    """Returns the placement of a config on a mesh with these axis sizes (see `rules.check`, `check_divisible`).

    Args:
        cfg: must fit the mesh, and have its vocabulary sizes and number of classes.

    Raises:
        UserError: the model or the optimizer cannot be built.
    """
    length = cfg.data.longest
    rows = bucket_sizes(cfg.data)[length] if cfg.data.batching == "buckets" else cfg.data.batch_size
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, attention_backend="reference"))  # runs anywhere
    model = registry.build(cfg.model)
    boxed = registry.shapes(model)
    placed = state.abstract(model, optimizers.build(cfg, boxed), cfg, mesh)
    parameters, micro_batches = _device_bytes(placed.params), cfg.train.accumulate
    rows, length = rows // data_parallelism(mesh), length // sizes["sequence"]
    trained = jax.tree.leaves(trainable(placed.params))
    numbers = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in trained)
    return Placement(
        groups=tuple(_groups(boxed, base(placed.params))),
        parameters=parameters,
        optimizer=_device_bytes(placed.opt_state),
        mean=_device_bytes(placed.ema),
        gradients=_device_bytes(trained) + (FLOAT32 * numbers if micro_batches > 1 else 0),
        activations=rows // micro_batches * length * _activation_bytes(cfg, sizes["tensor"]),
        checkpoint=cost.size_bytes(placed),
        rows=rows,
        length=length,
    )


def _groups(boxed: Any, params: Any) -> Iterator[Group]:
    boxes = jax.tree.leaves(boxed, is_leaf=is_axis_metadata)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for box, (name, leaf) in zip(boxes, named_leaves(params), strict=True):
        name = re.sub(r"layers_\d+", "layers_*", name)
        groups.setdefault((name, leaf.shape, getattr(box, "names", ())), []).append(leaf)
    for (name, shape, axes), leaves in groups.items():
        yield Group(name, len(leaves), shape, axes, leaves[0].sharding.spec, _device_bytes(leaves))


def _device_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _activation_bytes(cfg: Config, tensor: int) -> int:
    """Estimates the activations per token that any `model.remat` keeps; `tensor` devices share the logits."""
    model = cfg.model
    logits = 0 if model.model_class.classifies or cfg.train.loss_chunk else (model.vocab_size or 0) // tensor
    return (sum(model.depths) * model.dim + logits) * jnp.dtype(model.dtype).itemsize
