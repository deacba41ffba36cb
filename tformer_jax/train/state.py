"""The training state, created sharded."""

from collections.abc import Callable
from typing import Any, TypeVar

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh

from tformer_jax.base.cpu import initialization_options
from tformer_jax.config import Config
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.train import optimizers
from tformer_jax.train.parameters import trainable

T = TypeVar("T")


@flax.struct.dataclass
class TrainState:
    """Everything that a train step updates. The dropout key is derived from the seed and `step`."""

    step: jax.Array
    """int32 scalar: number of steps so far, skipped ones included."""
    skipped: jax.Array
    """int32 scalar: number of consecutive skipped steps up to this one."""
    params: Any
    """All parameters; `parameters.Adapted` if `train.lora_rank` is positive."""
    opt_state: optax.OptState
    ema: Any
    """Exponential moving average of the trainable parameters, float32; None if `train.ema_decay` is None."""


def create(
    model: nn.Module, optimizer: optax.GradientTransformation, cfg: Config, mesh: Mesh, params: Any = None
) -> TrainState:
    """Creates the initial state, each leaf directly on the devices that hold it.

    It is compiled with `base.cpu.initialization_options`.

    Args:
        params: initial parameters of the model; None: newly initialized ones.
    """
    init, start = initializer(model, optimizer, cfg, mesh)
    return on_devices(init, start, mesh, *(() if params is None else (params,)))


def on_devices(function: Callable[..., T], results: Any, mesh: Mesh, *arguments: Any, donate: bool = False) -> T:
    """Calls a function that is compiled as `create` describes.

    Args:
        results: the results' shapes, with shardings.
        donate: the results take the memory of `arguments`, which must not be used afterwards.
    """
    options = initialization_options(mesh.devices.flat[0].platform)
    donated = tuple(range(len(arguments))) if donate else ()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, results)
    with rules.use_mesh(mesh):
        compiled = jax.jit(function, out_shardings=shardings, donate_argnums=donated, compiler_options=options)
        return compiled(*arguments)


def abstract(
    model: nn.Module, optimizer: optax.GradientTransformation, cfg: Config, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state, for restoring a checkpoint, without computing it."""
    return initializer(model, optimizer, cfg, mesh)[1]


def initializer(
    model: nn.Module, optimizer: optax.GradientTransformation, cfg: Config, mesh: Mesh | AbstractMesh
) -> tuple[Callable[..., TrainState], TrainState]:
    """Returns a function from parameters (default: newly initialized) to the initial state, and `abstract`'s result."""
    shapes = registry.shapes(model)

    def init(params: Any = None) -> TrainState:
        if params is None:
            params = nn.unbox(registry.init(model, jax.random.key(cfg.seed)))
        if cfg.train.lora_rank:
            from tformer_jax.train import lora

            params = lora.adapt(cfg.train, model, params, jax.random.split(jax.random.key(cfg.seed))[1])
        trained, zero = trainable(params), jnp.zeros((), jnp.int32)
        mean = None if cfg.train.ema_decay is None else optax.tree.cast(trained, jnp.float32)
        return TrainState(step=zero, skipped=zero, params=params, opt_state=optimizer.init(trained), ema=mean)

    with rules.use_mesh(mesh):  # as in `on_devices`, which JAX then need not trace again
        start = jax.eval_shape(init)
    zero1 = cfg.parallel.preset == "zero1"
    moments = optimizers.trainable_shapes(cfg, shapes) if cfg.train.lora_rank else optimizers.split_shapes(cfg)
    return init, rules.sharded_state(mesh, shapes, start, boxed_moments=moments, zero1=zero1)
