"""What a step can tell beside its loss: norms by layer, gradient noise, and where a number first is not finite."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tformer_jax.models import registry
from tformer_jax.models.losses import batch_loss


def layer_norms(tree: Any, name: str) -> dict[str, jax.Array]:
    """The L2 norm of all parameters (or gradients) of each layer, as `NAME/decoder/layers_0`."""
    layers: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        layers.setdefault(layer_of("/".join(str(key.key) for key in path)), []).append(leaf)
    return {f"{name}/{layer}": optax.tree.norm(leaves) for layer, leaves in layers.items()}


def layer_of(parameter: str) -> str:
    """`decoder/layers_0` of `decoder/layers_0/ffn/expand/kernel`; the module of a parameter outside the layers."""
    found = re.match(r".*?layers(_\d+)?(?=/)", parameter)
    return found[0] if found else parameter.rpartition("/")[0]


def noise_parts(norm: jax.Array, norms: jax.Array, small: jax.Array, big: jax.Array) -> dict[str, jax.Array]:
    """Unbiased estimates of the squared gradient and of its variance ("Large-Batch Training", 2018, appendix A.1).

    Their ratio, once each is averaged over many steps, is the noise scale: the batch size, in labels, beyond which
    larger batches help less.

    Args:
        norm: of the gradient of the whole batch, of `big` labels.
        norms: [parts], of the gradients of its parts, of about `small` labels each.
    """
    part, whole = (norms**2).mean(), norm**2
    return {
        "gradient_squared": (big * whole - small * part) / (big - small),
        "gradient_variance": (part - whole) / (1 / small - 1 / big),
    }


def first_non_finite(
    model: nn.Module, params: Any, batch: Mapping[str, np.ndarray], key: jax.Array, label_smoothing: float
) -> str:
    """Where a step on this batch first has a number that is not finite, in words; slow: it runs without `jit`.

    Looks at the parameters, then at what each module gives in the forward pass, in order, then at the gradients.
    """
    for name, leaf in _named(params):
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
        registry.forward(model, params, batch, train=True, dropout_key=key)
    if found:
        return found[0]

    def loss(params: Any) -> jax.Array:
        return batch_loss(model, params, batch, label_smoothing=label_smoothing, dropout_key=key)[0].loss

    value, grads = jax.value_and_grad(loss)(params)
    if not np.isfinite(value):
        return "loss"
    bad = [name for name, leaf in _named(grads) if not np.isfinite(np.asarray(leaf, np.float32)).all()]
    return f"gradient of {bad[-1]}" if bad else "sum of the squared gradients"


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield "/".join(str(key.key) for key in path), leaf
