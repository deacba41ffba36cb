"""Diagnostics of a train step: norms by layer, gradient noise, and the origin of non-finite numbers."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tformer_jax.models import registry
from tformer_jax.models.losses import batch_loss
from tformer_jax.nn.module import named_leaves


def layer_norms(tree: Any, name: str) -> dict[str, jax.Array]:
    """Returns the L2 norm of each layer's parameters (or gradients), named `NAME/decoder/layers_0`."""
    layers: dict[str, list[jax.Array]] = {}
    for parameter, leaf in named_leaves(tree):
        layers.setdefault(layer_of(parameter), []).append(leaf)
    return {f"{name}/{layer}": optax.tree.norm(leaves) for layer, leaves in layers.items()}


def layer_of(parameter: str) -> str:
    """Returns the layer of a parameter: `decoder/layers_0` for `decoder/layers_0/ffn/expand/kernel`.

    Outside of the layers, returns the parameter's module.
    """
    found = re.match(r".*?layers(_\d+)?(?=/)", parameter)
    return found[0] if found else parameter.rpartition("/")[0]


def noise_parts(norm: jax.Array, norms: jax.Array, small: jax.Array, big: jax.Array) -> dict[str, jax.Array]:
    """Returns unbiased estimates of the squared gradient norm and the gradient variance.

    Averaged over many steps, `gradient_variance / gradient_squared` is the noise scale: the batch size, in labels,
    beyond which larger batches help less ("An Empirical Model of Large-Batch Training", 2018, appendix A.1).

    Args:
        norm: norm of the gradient of a batch of `big` labels.
        norms: [accumulate], norms of the gradients of its micro-batches of about `small` labels each.
    """
    of_parts, of_batch = (norms**2).mean(), norm**2
    return {
        "gradient_squared": (big * of_batch - small * of_parts) / (big - small),
        "gradient_variance": (of_parts - of_batch) / (1 / small - 1 / big),
    }


def origin(
    model: nn.Module, params: Any, batch: Mapping[str, np.ndarray], key: jax.Array, label_smoothing: float
) -> str:
    """Describes the origin of non-finite numbers: the result of `first_non_finite`, or why it failed."""
    try:
        return f"first non-finite value: the {first_non_finite(model, params, batch, key, label_smoothing)}"
    except jax.errors.JaxRuntimeError as error:  # the search runs the whole model on one device
        return f"the search for the first non-finite value failed: {' '.join(str(error).split())[:300]}"


def first_non_finite(
    model: nn.Module, params: Any, batch: Mapping[str, np.ndarray], key: jax.Array, label_smoothing: float
) -> str:
    """Names the first non-finite value of a step on this batch; slow, since it runs without `jit`.

    Checks the parameters, the output of each module in the forward pass, in order, the loss, and the gradients.
    """
    for name, leaf in named_leaves(params):
        if not np.isfinite(np.asarray(leaf, np.float32)).all():
            return f"parameter {name}"
    found: list[str] = []

    def look(call, args, kwargs, context):
        result = call(*args, **kwargs)
        for array in jax.tree.leaves(result):
            concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
            if concrete and jnp.issubdtype(array.dtype, jnp.floating) and not jnp.isfinite(array).all() and not found:
                found.append(f"output of {'/'.join(context.module.path) or type(context.module).__name__}")
        return result

    with nn.intercept_methods(look), jax.disable_jit():
        registry.forward(model, jax.tree.map(jnp.asarray, params), batch, train=True, dropout_key=key)
    if found:
        return found[0]

    def loss(params: Any) -> jax.Array:
        return batch_loss(model, params, batch, label_smoothing=label_smoothing, dropout_key=key)[0].loss

    value, grads = jax.value_and_grad(loss)(params)
    if not np.isfinite(value):
        return "loss"
    bad = [name for name, leaf in named_leaves(grads) if not np.isfinite(np.asarray(leaf, np.float32)).all()]
    return f"gradient of {bad[-1]}" if bad else "sum of the squared gradients"
