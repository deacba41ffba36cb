"""Muon: updates of matrices whose singular values are about equal."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core.meta import is_axis_metadata
from optax import contrib

from tformer_jax.config import OptimConfig
from tformer_jax.config.kinds import Limit, declares
from tformer_jax.train.optimizer_kinds import adamw
from tformer_jax.train.parameters import matrix_axes

MUON_RMS = 0.2
"""RMS of Muon's updates, chosen to match AdamW so that one learning rate fits both ("Muon is Scalable", 2025)."""


@declares(
    settings=("beta1", "beta2", "eps", "muon_beta"),
    width_power=-0.5,
    limits=(Limit("train.lora_rank", (0,), "would use AdamW for all factors"),),
)
def muon(optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any) -> optax.GradientTransformation:
    """Muon (2024) for matrices of layers, AdamW for all other parameters."""

    def choose(tree: Any, label: str) -> Any:
        return jax.tree.map(lambda leaf, own: leaf if own == label else optax.MaskedNode(), tree, labels)

    numbers = jax.tree.map(lambda box: matrix_axes(box.names) or optax.MaskedNode(), shapes, is_leaf=is_axis_metadata)
    labels = jax.tree.map(lambda box: "muon" if matrix_axes(box.names) else "adamw", shapes, is_leaf=is_axis_metadata)
    matrices = optax.chain(
        optax.trace(optim.muon_beta, nesterov=True),
        optax.stateless(lambda momentum, _: _orthogonal(momentum, numbers)),
        optax.add_decayed_weights(optim.weight_decay, choose(mask, "muon")),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": matrices, "adamw": adamw(optim, schedule, choose(mask, "adamw"), None)}, labels)


def _orthogonal(momentum: Any, numbers: Any) -> Any:
    """Orthogonalizes the momentum by Newton-Schulz iteration and scales it to the size of AdamW's updates.

    Matrices of one shape are stacked, so that compilation takes no longer for many layers than for one. Optax's Muon
    runs without its own momentum, which weighs the first gradients differently than the published momentum does.
    """
    matrices, structure = jax.tree.flatten(jax.tree.map(_as_matrices, momentum, numbers))
    members: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        members.setdefault(matrix.shape[1:], []).append(index)
    stacks = {shape: jnp.concatenate([matrices[index] for index in indices]) for shape, indices in members.items()}
    by_matrix = dict.fromkeys(stacks, contrib.MuonDimensionNumbers(1, 2))
    newton_schulz = contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=by_matrix)
    stacks, _ = newton_schulz.update(stacks, newton_schulz.init(stacks))
    for shape, indices in members.items():
        ends = np.cumsum([len(matrices[index]) for index in indices])
        for index, part in zip(indices, jnp.split(stacks[shape], ends[:-1]), strict=True):
            matrices[index] = MUON_RMS * math.sqrt(max(shape)) * part
    return jax.tree.map(_as_parameter, jax.tree.unflatten(structure, matrices), momentum, numbers)


def _as_matrices(array: jax.Array, sides: contrib.MuonDimensionNumbers) -> jax.Array:
    """Reshapes a parameter to matrices [n, rows, columns], transposed if rows > columns."""
    rows, columns = (math.prod(array.shape[axis] for axis in side) for side in sides)
    matrices = array.reshape(-1, rows, columns)
    return matrices if rows <= columns else jnp.swapaxes(matrices, 1, 2)


def _as_parameter(matrices: jax.Array, parameter: jax.Array, sides: contrib.MuonDimensionNumbers) -> jax.Array:
    """Inverts `_as_matrices`: returns an array of the parameter's shape."""
    rows, columns = (math.prod(parameter.shape[axis] for axis in side) for side in sides)
    return (matrices if rows <= columns else jnp.swapaxes(matrices, 1, 2)).reshape(parameter.shape)
