"""The rules that map logical axes to mesh axes, and the shardings of training states by them."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tformer_jax import axes
from tformer_jax.config import Config, ModelConfig, ParallelConfig, kinds
from tformer_jax.parallel.mesh import BATCH_AXES

Rules = Mapping[str, tuple[str, ...]]

RULES: Rules = {
    axes.BATCH: BATCH_AXES,
    axes.LENGTH: ("sequence",),
    axes.EMBED: ("fsdp",),
    axes.HEADS: ("tensor",),
    axes.KV_HEADS: ("tensor",),
    axes.HEAD_DIM: (),
    axes.MLP: ("tensor",),
    axes.EXPERTS: ("expert",),
    axes.LAYERS: (),
    axes.VOCAB: ("tensor",),
    axes.CLASSES: (),
}
ZERO1: Rules = {**RULES, axes.EMBED: ("fsdp", "data")}
"""Rules of the optimizer state for `parallel.preset="zero1"` ("ZeRO", 2020, stage 1)."""

MUST_DIVIDE = {axes.HEADS: "num_heads", axes.MLP: "ffn_dim", axes.EMBED: "dim", axes.EXPERTS: "moe.num_experts"}
"""Settings of model that must be multiples of their mesh axes; others are replicated if they are not."""


@contextlib.contextmanager
def use_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Context in which traced activations are sharded by `RULES`; arguments must be on the mesh."""
    linen_rules = [(name, where or None) for name, where in RULES.items()]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(linen_rules):
        yield


def parameter_spec(
    names: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int], rules: Rules
) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array by its logical axes.

    An axis that its mesh axes do not divide evenly is sharded over the first mesh axes that do, or not at all.
    Vectors of the model width (norm scales, biases) are not sharded either: that would cost a collective each.
    (`nn.sharding.activation_spec` shards an axis over all of its mesh axes or over none.)

    Args:
        sizes: sizes of the mesh axes.
    """
    vector = len([name for name in names if name != axes.LAYERS]) == 1

    def place(name: str | None, size: int) -> tuple[str, ...] | str | None:
        where = tuple(axis for axis in rules.get(name or "", ()) if sizes[axis] > 1)
        if vector and name == axes.EMBED:
            return None
        while size % math.prod(sizes[axis] for axis in where):
            where = where[:-1]
        return where if len(where) > 1 else next(iter(where), None)

    return PartitionSpec(*map(place, names, shape))


def parameter_specs(boxed: Any, sizes: Mapping[str, int], rules: Rules = RULES) -> Any:
    """Returns the `PartitionSpec` of each leaf of a tree of shapes; leaves without logical axes are replicated."""

    def place(leaf: Any) -> PartitionSpec:
        if not isinstance(leaf, nn.LogicallyPartitioned):
            return PartitionSpec()
        return parameter_spec(leaf.names, leaf.value.shape, sizes, rules)

    return jax.tree.map(place, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))


def sharded_state(
    mesh: Mesh | AbstractMesh, boxed_params: Any, state: Any, *, boxed_moments: Any = None, zero1: bool = False
) -> Any:
    """Returns the shape, dtype and `NamedSharding` of each leaf of a training state.

    A leaf whose path ends with a parameter's path and which has its shape (a moment, a moving average) is sharded like
    the parameter; with `zero1`, by `ZERO1` unless it is the parameter itself. The parts of a parameter that is stored
    in several arrays are sharded in the same way, along the axes that have its size. Other leaves are replicated.

    Args:
        boxed_params: parameter shapes, boxed with their logical axes.
        state: the state, as shapes.
        boxed_moments: parameter shapes as in the optimizer state, if it splits fused parameters or is LoRA's.
    """

    def by_path(boxed: Any, rules: Rules) -> dict[Any, tuple[tuple[int, ...], PartitionSpec]]:
        shapes = jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
        specs = jax.tree.leaves(parameter_specs(boxed, mesh.shape, rules))
        return {path: (leaf.shape, spec) for (path, leaf), spec in zip(shapes, specs, strict=True)}

    parameters, moments = (
        by_path(boxed_params, rules) | by_path(boxed_moments, rules) for rules in (RULES, ZERO1 if zero1 else RULES)
    )

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        specs = parameters if path[0] == jax.tree_util.GetAttrKey("params") else moments
        for start in range(len(path)):
            shape, spec = specs.get(path[start:], (None, None))
            if spec is not None and shape == leaf.shape:
                return NamedSharding(mesh, spec)
            whole = specs.get(path[start:-1])
            if whole is not None and isinstance(path[-1], jax.tree_util.GetAttrKey):
                shape, spec = whole
                sides = zip(spec, shape, leaf.shape, strict=True)
                return NamedSharding(mesh, PartitionSpec(*(side if size == own else None for side, size, own in sides)))
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(path, leaf)), state
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batches, along their first axis, B."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding that replicates an array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check(cfg: Config, sizes: Mapping[str, int]) -> None:
    """Checks that a mesh with axes of these sizes divides the model and the rows of the data evenly.

    Raises:
        UserError: an axis does not divide what it shards.
    """
    check_model(cfg, sizes)
    data, sequence = cfg.data, sizes["sequence"]
    lengths: dict[str, tuple[int, ...]] = {"window": (data.window,), "source_window": (data.source_window or 0,)}
    if data.batching == "buckets":
        lengths = {"bucket_lengths": data.bucket_lengths}
    for name, sizes_of_rows in lengths.items():
        if any(length % sequence for length in sizes_of_rows):
            kind = "contain only multiples" if name == "bucket_lengths" else "be a multiple"
            raise data.error(name, f"must {kind} of the mesh's sequence={sequence}")


def check_model(cfg: Config, sizes: Mapping[str, int]) -> None:
    """Checks that a mesh with axes of these sizes divides the model and the optimizer state evenly.

    Raises:
        UserError: an axis does not divide what it shards, or shards nothing of the model.
    """
    model = cfg.model
    if sizes["expert"] > 1 and not model.uses_experts:
        raise cfg.parallel.error(
            "expert", "the model has no experts; write model.ffn='moe', or use parallel.fsdp instead"
        )
    check_sharding(model, cfg.parallel, sizes)
    shares = {axis: sizes[axis] for axis in ZERO1[axes.EMBED] if sizes[axis] > 1}
    if cfg.parallel.preset == "zero1" and model.dim % math.prod(shares.values()):
        product = " * ".join(f"{axis}={size}" for axis, size in shares.items())
        raise model.error("dim", f"must be a multiple of the mesh's {product} for parallel.preset='zero1'")


def check_sharding(model: ModelConfig, parallel: ParallelConfig, sizes: Mapping[str, int]) -> None:
    """Checks that a mesh with axes of these sizes can hold the parameters of a model and compute it.

    Raises:
        UserError: an axis does not divide what it shards.
    """
    for name, setting in MUST_DIVIDE.items():
        for axis in RULES[name]:
            if attrgetter(setting)(model) % sizes[axis] and (model.uses_experts or name != axes.EXPERTS):
                raise model.error(setting, f"must be a multiple of the mesh's {axis}={sizes[axis]}")
    recurrent = [kind for kind in model.attentions if kinds.is_recurrent(kind)]
    if recurrent and sizes["sequence"] > 1:
        raise parallel.error("sequence", f"attention {recurrent[0]!r} reads its tokens in order; write 1")
