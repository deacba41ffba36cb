"""Bytes of parameters: where they rest, and where they are computed with."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tformer_jax import axes
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import BATCH_AXES
from tformer_jax.train import optimizers
from tformer_jax.train.scaling.layout import Layout

LAYER = re.compile(r".*/(periods|layers_\d+)(?=/)")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, or its repetitions in a loop over layers. Numbers are those of one device."""

    name: str
    dtype: np.dtype
    repetitions: int
    stored: int
    """Numbers of the part that rests on a device."""
    moment: int
    """Numbers of the part for which a device has the optimizer's moments, and makes the update."""
    used: int
    """Numbers that a device computes with."""
    batch_axes: tuple[str, ...]
    """Axes whose devices compute with the same numbers on other tokens: their gradients are summed."""

    @property
    def layer(self) -> str | None:
        """The layer it belongs to, such as decoder/layers_0; None: to no layer."""
        found = LAYER.match(self.name)
        return found and found[0]

    @property
    def is_split(self) -> bool:
        """Whether a device has moments for a part only of what it computes with."""
        return self.moment < self.used


def parameters(layout: Layout) -> list[Parameter]:
    """All parameters of a model on a mesh."""
    boxed = registry.shapes(registry.build(layout.model))
    zero1 = layout.cfg.parallel.preset == "zero1"
    tables = rules.RULES, rules.ZERO1 if zero1 else rules.RULES
    specs = [jax.tree.leaves(rules.partitions(boxed, layout.sizes, table), is_leaf=rules.is_spec) for table in tables]
    boxes = jax.tree.leaves(boxed, is_leaf=lambda node: hasattr(node, "names"))
    names = jax.tree.leaves(optimizers.parameter_names(boxed))
    return [
        _parameter(name, box, stored, moment, layout.mesh)
        for name, box, stored, moment in zip(names, boxes, *specs, strict=True)
    ]


def _parameter(name: str, box: Any, stored: PartitionSpec, moment: PartitionSpec, mesh: AbstractMesh) -> Parameter:
    shape = box.value.shape
    used = PartitionSpec(*(None if entry == "fsdp" else entry for entry in stored))
    rests, updated, computed = (share(shape, NamedSharding(mesh, spec)) for spec in (stored, moment, used))
    loop = axes.LAYERS in box.names
    split = {axis for entry in used if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
    others = tuple(axis for axis in (*BATCH_AXES, "sequence") if mesh.shape[axis] > 1 and axis not in split)
    repetitions = shape[box.names.index(axes.LAYERS)] if loop else 1
    return Parameter(name, np.dtype(box.value.dtype), repetitions, rests, updated, computed, others)


def share(shape: tuple[int, ...], sharding: NamedSharding) -> int:
    """Numbers of an array that one of the devices has which it is spread over."""
    return math.prod(sharding.shard_shape(shape))
