"""Low-rank adaptation: "LoRA: Low-Rank Adaptation of Large Language Models" (2022).

A kernel W [I, O] of a layer acts as `W + (alpha / r) A B` with A [I, r] and B [r, O]. Only A and B are trained, and
gradients and optimizer states are only for them. They start with A from N(0, 1 / I) and B = 0, so that the model is
unchanged. A step computes `x W + (x A) B`; only of experts' kernels, it computes the sums before the forward pass, and
their full gradients. With `train.lora_base`, W is stored as int8 ("QLoRA", 2023, has 4 bits). Weight decay is for the
factors of the kernels that `optim.decayed` names.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from tformer_jax.config import TrainConfig
from tformer_jax.models import registry
from tformer_jax.nn.quantized import dequantize, is_quantized
from tformer_jax.train.parameters import STACKED_AXES, Adapted, base, match_globs, matrix_axes


def trainable_shapes(train: TrainConfig, shapes: Any) -> Any:
    """Returns the boxed shapes of the trainable parameters: the factors and `train.lora_whole`.

    A [*layers, *inputs, r] and B [*layers, r, *outputs] have the axes of their kernel.

    Args:
        shapes: shapes of all parameters, boxed with their logical axes (`registry.shapes`).

    Raises:
        UserError: as `parameters.match_globs`, or the rank exceeds a side of a kernel.
    """
    boxes = {"/".join(path): box for path, box in flatten_dict(shapes).items()}
    matrices = {name: box for name, box in boxes.items() if matrix_axes(getattr(box, "names", ()))}
    if train.lora_kernels and not matrices:
        raise train.error("lora_kernels", "the model has no kernels of layers; write () and name train.lora_whole")
    whole = _fitting(train, "lora_whole", boxes)
    chosen = {name: boxes[name] for name in whole}
    for name in _fitting(train, "lora_kernels", matrices):
        if name not in whole:
            chosen |= _factors(train, name, matrices[name])
    return unflatten_dict(chosen, sep="/")


def _fitting(train: TrainConfig, setting: str, boxes: dict[str, Any]) -> list[str]:
    """Returns the names of parameters that match a glob of the setting; each glob must match at least one."""
    matches = {name for glob in getattr(train, setting) for name in match_globs(train, setting, glob, [*boxes])}
    return [name for name in boxes if name in matches]


def _factors(train: TrainConfig, name: str, box: nn.LogicallyPartitioned) -> dict[str, nn.LogicallyPartitioned]:
    """Returns the boxed shapes of A and B of one kernel."""
    matrix, rank = matrix_axes(box.names), train.lora_rank
    assert matrix is not None
    (inputs, outputs), shape, names = matrix, box.value.shape, box.names
    layers = inputs[0]
    side = min(math.prod(shape[axis] for axis in side) for side in (inputs, outputs))
    if rank > side:
        raise train.error("lora_rank", f"must be at most {side}, the smaller side of {name}")
    a = (*shape[: outputs[0]], rank), (*names[: outputs[0]], None)
    b = (*shape[:layers], rank, *shape[outputs[0] :]), (*names[:layers], None, *names[outputs[0] :])
    return {
        f"{name}/{factor}": box.replace(value=jax.ShapeDtypeStruct(shape, jnp.float32), names=names)
        for factor, (shape, names) in (("a", a), ("b", b))
    }


def adapt(train: TrainConfig, model: nn.Module, params: Any, key: jax.Array) -> Any:
    """Returns parameters with initial factors that leave the model unchanged; `lora_base` rounds kernels of layers."""
    given, boxes = flatten_dict(params), flatten_dict(trainable_shapes(train, registry.shapes(model)))
    start = {path: given[path] for path in boxes if path in given} | _draw_factors(boxes, given, key)
    base = registry.quantized(model, params, exempt=start) if train.lora_base else params
    return Adapted(base, unflatten_dict(start), train.lora_alpha / train.lora_rank, model.cfg.param_dtype)


def _draw_factors(
    boxes: Mapping[tuple[str, ...], nn.LogicallyPartitioned], given: Collection[tuple[str, ...]], key: jax.Array
) -> dict[tuple[str, ...], jax.Array]:
    """Returns the initial factors among `boxes`; factors of one shape are drawn together, by one compilation."""
    start: dict[tuple[str, ...], jax.Array] = {}
    alike: dict[Any, list[tuple[int, tuple[str, ...]]]] = {}
    for number, (path, box) in enumerate(boxes.items()):
        if path in given:
            continue
        if path[-1] == "a":
            alike.setdefault((box.value.shape, box.names), []).append((number, path))
        else:
            start[path] = jnp.zeros(box.value.shape, box.value.dtype)
    for (shape, names), members in alike.items():
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array([number for number, _ in members]))
        draws = jax.vmap(lambda own, shape=shape: jax.random.normal(own, shape, jnp.float32))(keys)
        inputs = [size for name, size in zip(names, shape, strict=True) if name not in STACKED_AXES][:-1]
        start |= {path: draws[row] / math.sqrt(math.prod(inputs)) for row, (_, path) in enumerate(members)}
    return start


def merged(params: Any) -> Any:
    """Returns the parameters of the adapted model; products and sums are in float32, leaves keep their dtypes."""
    if not isinstance(params, Adapted):
        return params
    leaves = flatten_dict(_updated(params))
    for path, leaf in leaves.items():
        if is_quantized(leaf):
            leaves[path] = dequantize(leaf).astype(params.dtype)
    return unflatten_dict(leaves)


def _updated(params: Adapted) -> Any:
    """Returns the base with its updates; kernels without an update stay as they are stored."""
    leaves, new = flatten_dict(params.base), flatten_dict(params.trainable)
    for path, leaf in new.items():
        if path in leaves:
            leaves[path] = leaf
        elif path[-1] == "a":
            kernel = leaves[path[:-1]]
            update = params.scale * product(leaf, new[*path[:-1], "b"], kernel.ndim)
            whole, dtype = (dequantize(kernel), params.dtype) if is_quantized(kernel) else (kernel, kernel.dtype)
            leaves[path[:-1]] = (whole.astype(jnp.float32) + update).astype(dtype)
    return unflatten_dict(leaves)


def split(params: Adapted, kernels: Collection[tuple[str, ...]]) -> tuple[Any, Any]:
    """Returns the parameters of the adapted model without the updates of `kernels`, and these updates.

    Args:
        kernels: paths of kernels that a model updates itself (`registry.linear_kernels`).

    Returns:
        The parameters, as `merged` returns them except that int8 kernels may stay int8; the updates, as
        `registry.forward` takes `low_rank`.
    """
    new = flatten_dict(params.trainable)
    apart = {path: leaf for path, leaf in new.items() if path[:-1] in kernels and path[-1] in ("a", "b")}
    rest = dataclasses.replace(params, trainable=unflatten_dict({path: new[path] for path in new if path not in apart}))
    updates = {path: params.scale * leaf if path[-1] == "b" else leaf for path, leaf in apart.items()}
    return _updated(rest), unflatten_dict(updates)


def merged_on_device(params: Adapted) -> Any:
    """Returns `merged`, compiled, with the shardings of the base."""
    where = jax.tree.map(lambda leaf: leaf.sharding, base(params))
    return jax.jit(merged, out_shardings=where)(params)


def product(a: jax.Array, b: jax.Array, axes: int) -> jax.Array:
    """Computes A B: [*layers, *inputs, r], [*layers, r, *outputs] -> [*layers, *inputs, *outputs], of `axes` axes."""
    layers = a.ndim + b.ndim - 2 - axes
    stacked = tuple(range(layers))
    return jax.lax.dot_general(a, b, (((a.ndim - 1,), (layers,)), (stacked, stacked)))
