"""What training carries from step to step, born sharded."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh

from tformer_jax.models import registry
from tformer_jax.parallel import rules


@flax.struct.dataclass
class TrainState:
    """Everything a step changes. The dropout key is no part of it: it follows from the seed and `step`."""

    step: jax.Array
    """int32 scalar: updates made so far."""
    params: Any
    opt_state: optax.OptState


def create(model: nn.Module, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """A fresh state; each parameter and each moment is initialised on the devices that will hold it."""
    init, shardings = _initializer(model, optimizer, seed, mesh)
    return jax.jit(lambda: nn.unbox(init()), out_shardings=shardings)()


def abstract(model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, for restoring a checkpoint; nothing is computed."""
    init, shardings = _initializer(model, optimizer, 0, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: nn.unbox(init())),
        shardings,
    )


def parameter_count(params: Any) -> int:
    """Number of trained scalars."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _initializer(model, optimizer, seed, mesh):
    def init() -> TrainState:
        params = registry.init(model, jax.random.key(seed))
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

    return init, rules.shardings(mesh, jax.eval_shape(init))
