"""The search for the first non-finite value of a train step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import one_line
from tformer_jax.config import Config
from tformer_jax.models import registry
from tformer_jax.models.losses import Teacher
from tformer_jax.nn.module import named_leaves
from tformer_jax.train import lora, schedules
from tformer_jax.train.step import accumulated_gradients


def advice(cfg: Config) -> str:
    """Returns what makes divergence less likely: flags that a resume accepts, or another optimizer of Python."""
    if cfg.optim.optimizer == "python":
        return "train another run with a milder optimizer=, which train.start_from lets start from this one"
    rate, warmup, clip = schedules.peak(cfg) / 10, 10 * cfg.optim.warmup_steps, cfg.optim.clip_norm / 10 or 1.0
    flags = f"--config.optim.learning_rate={rate:.3g}, --config.optim.warmup_steps={warmup}"
    return f"repeat the command with --resume and such settings as {flags} or --config.optim.clip_norm={clip:.3g}"


def origin(model: nn.Module, params: Any, batch: Mapping[str, Any], key: jax.Array, cfg: Config, *teacher: Any) -> str:
    """Describes the origin of non-finite numbers: the result of `first_non_finite`, or why it failed."""
    try:
        return f"first non-finite value: the {first_non_finite(model, params, batch, key, cfg, *teacher)}"
    except Exception as error:  # the run ends with an error of its own
        return f"the search for the first non-finite value failed: {one_line(error)}"


def first_non_finite(
    model: nn.Module,
    params: Any,
    batch: Mapping[str, Any],
    key: jax.Array,
    cfg: Config,
    teacher: Teacher | None = None,
) -> str:
    """Names the first non-finite value of a step on this batch; slow, since it runs without `jit`, on one device.

    Checks the parameters, the output of each module in the forward pass, in order, the losses, and the gradients.

    Args:
        params: parameters of the training state, as NumPy or JAX arrays.
        key: the step's random key, as for `step.accumulated_gradients`.
    """
    params = jax.tree.map(jnp.asarray, params)
    teacher = teacher and teacher._replace(params=jax.tree.map(jnp.asarray, teacher.params))
    full = lora.merged(params)
    for name, leaf in named_leaves(full):
        if not _is_finite(leaf):
            return f"parameter {name}"
    if module := _first_module(model, full, batch, key):
        return f"output of {module}"
    sums, auxiliary_loss, grads, _ = accumulated_gradients(model, params, batch, key, cfg, teacher=teacher)
    if not _is_finite(sums.loss):
        return "loss"
    if cfg.train.z_loss and not _is_finite(cfg.train.z_loss * sums.z):
        return "z-loss (train.z_loss)"
    if not _is_finite(auxiliary_loss):
        return "auxiliary loss of the experts"
    bad = [name for name, leaf in named_leaves(grads) if not _is_finite(leaf)]
    return f"gradient of {bad[-1]}" if bad else "sum of the squared gradients"


def _first_module(model: nn.Module, params: Any, batch: Mapping[str, Any], key: jax.Array) -> str | None:
    """Names the first module of the forward pass with a non-finite output; without `remat`, which hides values."""
    modules: list[str] = []

    def look(call, args, kwargs, context):
        result = call(*args, **kwargs)
        for array in jax.tree.leaves(result):
            concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
            if concrete and jnp.issubdtype(array.dtype, jnp.floating) and not _is_finite(array) and not modules:
                modules.append("/".join(context.module.path) or type(context.module).__name__)
        return result

    model = model.clone(cfg=dataclasses.replace(model.cfg, remat="none"))
    with nn.intercept_methods(look), jax.disable_jit():
        registry.forward(model, params, batch, train=True, dropout_key=key)
    return modules[0] if modules else None


def _is_finite(array: jax.Array) -> bool:
    return bool(np.isfinite(np.asarray(array, np.float32)).all())
