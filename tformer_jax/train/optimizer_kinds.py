"""Optimizers by name: `kind(optim, schedule, mask, shapes)` builds one.

`mask` is a bool tree, True for the parameters with weight decay; `shapes` are the parameters' shapes, boxed with their
logical axes. A kind may declare (`config.kinds.declares`) `settings` and `limits`, and also

- `elementwise`: whether the update of an element depends on nothing else of its parameter; if not, each layer of a
  scan, expert and fused projection must be a parameter of its own, so that their layout does not change the updates;
- `width_power`: the power of the width in muP's learning rate of matrices, -1 if updates have the size of a sign,
  because they add up over the inputs; without it, a config with muP is rejected.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core.meta import is_axis_metadata
from optax import contrib

from tformer_jax.config import OptimConfig
from tformer_jax.config.kinds import Limit, declares
from tformer_jax.train.parameters import STACKED_AXES


@declares(settings=("beta1", "beta2", "eps"), elementwise=True, width_power=-1)
def adamw(optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any) -> optax.GradientTransformation:
    """AdamW ("Decoupled Weight Decay Regularization", 2019)."""
    return optax.adamw(
        schedule, b1=optim.beta1, b2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay, mask=mask
    )


def adafactor(optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any) -> optax.GradientTransformation:
    """Adafactor (2018), with decoupled weight decay."""
    adafactor = optax.adafactor(schedule)

    def update(grads: Any, opt_state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
        rate = optim.weight_decay * schedule(opt_state[0].count)
        updates, opt_state = adafactor.update(grads, opt_state, params)
        if not optim.weight_decay:
            return updates, opt_state

        def decayed(decays: bool, update: Any, param: Any) -> Any:
            return jax.tree.map(lambda u, p: u - rate * p, update, param) if decays else update

        return jax.tree.map(decayed, mask, updates, params), opt_state

    return by_layer(optax.GradientTransformation(adafactor.init, update), shapes)


@declares(settings=("beta1", "beta2"), elementwise=True, width_power=-1)
def lion(optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any) -> optax.GradientTransformation:
    """Lion ("Symbolic Discovery of Optimization Algorithms", 2023)."""
    return optax.lion(schedule, b1=optim.beta1, b2=optim.beta2, weight_decay=optim.weight_decay, mask=mask)


@declares(settings=("beta1", "beta2", "eps"))
def lamb(optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any) -> optax.GradientTransformation:
    """LAMB ("Large Batch Optimization for Deep Learning", 2020)."""
    lamb = optax.lamb(
        schedule, b1=optim.beta1, b2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay, mask=mask
    )
    return by_layer(lamb, shapes)


@declares(settings=("beta1",), elementwise=True)
def sgd(optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any) -> optax.GradientTransformation:
    """SGD with momentum `beta1`; weight decay is an L2 penalty."""
    decay = optax.add_decayed_weights(optim.weight_decay, mask)
    return optax.chain(decay, optax.sgd(schedule, momentum=optim.beta1 or None))


def _check_momentum(optim: OptimConfig) -> None:
    if not optim.beta1:
        raise optim.error("beta1", "must be larger than 0 for optim.optimizer='schedule_free_adamw'")


@declares(
    settings=("beta1", "beta2", "eps"),
    elementwise=True,
    limits=(
        Limit("optim.schedule", ("constant",), "its average replaces a decay"),
        Limit("optim.learning_rate_factors", ((),), "its average has one learning rate"),
        Limit("train.weights", ("last", "best", "average_last", "average_best"), "evaluates its own average"),
        Limit("model.param_dtype", ("float32",), "computes its average from the parameters"),
    ),
    check=_check_momentum,
)
def schedule_free_adamw(
    optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any
) -> optax.GradientTransformation:
    """AdamW without a schedule ("The Road Less Scheduled", 2024); the averaged parameters are evaluated."""
    adamw = optax.adamw(schedule, b1=0.0, b2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay, mask=mask)
    free = contrib.schedule_free(adamw, lambda count: schedule(count - 1), b1=optim.beta1)

    def init(params: Any) -> optax.OptState:
        return free.init(params)._replace(step_count=jnp.ones((), jnp.int32))  # whatever the first count of Optax is

    return optax.GradientTransformationExtraArgs(init, free.update)


@declares(elementwise=True)
def python(optim: OptimConfig, schedule: optax.Schedule, mask: Any, shapes: Any) -> optax.GradientTransformation:
    """Stands in configs for an optimizer that is given in Python; only `tformer_jax.train` has it."""
    raise optim.error(
        "optimizer",
        "checkpoints of a run with an optimizer of Python are read only by tformer_jax.train(cfg, data=..., "
        "optimizer=..., resume=True), which finishes the run",
    )


def by_layer(optimizer: optax.GradientTransformation, shapes: Any) -> optax.GradientTransformation:
    """Maps an optimizer with `vmap` over the leading `STACKED_AXES` of each parameter."""

    def sizes(box: Any) -> str:
        named = zip(box.names, box.value.shape, strict=True)
        return ",".join(str(size) for _, size in itertools.takewhile(lambda axis: axis[0] in STACKED_AXES, named))

    def mapped(sizes: str) -> optax.GradientTransformation:
        init, update = optimizer.init, optimizer.update
        for _ in filter(None, sizes.split(",")):
            init, update = jax.vmap(init), jax.vmap(update)
        return optax.GradientTransformation(init, update)

    labels = jax.tree.map(sizes, shapes, is_leaf=is_axis_metadata)
    return optax.partition({label: mapped(label) for label in set(jax.tree.leaves(labels))}, labels)
