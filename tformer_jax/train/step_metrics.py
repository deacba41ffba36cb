"""The metrics of a train step: packed into one array, norms by layer, and gradient noise."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tformer_jax.nn.module import named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepMetrics(Mapping[str, jax.Array]):
    """Named scalars in one array, so that one transfer copies all of them to the host."""

    array: jax.Array
    """float32 [len(names)]."""
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> jax.Array:
        return self.array[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def pack(metrics: Mapping[str, jax.Array]) -> StepMetrics:
    """Packs float32 scalars into one array."""
    return StepMetrics(jnp.stack(list(metrics.values())), tuple(metrics))


def fetch(steps: Sequence[StepMetrics]) -> list[dict[str, float]]:
    """Copies the metrics of several steps to the host as floats; blocks until they are computed."""
    rows = jax.device_get([step.array for step in steps])
    return [dict(zip(step.names, row.tolist(), strict=True)) for step, row in zip(steps, rows, strict=True)]


def layer_norms(tree: Any, name: str) -> dict[str, jax.Array]:
    """Returns the L2 norm of each layer's parameters (or gradients), named `NAME/decoder/layers_0`.

    The repetitions of scanned layers have one norm.
    """
    layers: dict[str, list[jax.Array]] = {}
    for parameter, leaf in named_leaves(tree):
        layers.setdefault(layer_of(parameter), []).append(leaf)
    return {
        f"{name}/{layer}": optax.tree.norm(optax.tree.cast(leaves, jnp.float32)) for layer, leaves in layers.items()
    }


def layer_of(parameter: str) -> str:
    """Returns the layer of a parameter: `decoder/layers_0` for `decoder/layers_0/ffn/expand/kernel`.

    Outside of the layers, returns the parameter's module.
    """
    match = re.match(r".*?layers(_\d+)?(?=/)", parameter)
    return match[0] if match else parameter.rpartition("/")[0]


def noise_estimates(norm: jax.Array, norms: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Returns unbiased estimates of the squared gradient norm and the gradient variance.

    Averaged over many steps, `gradient_variance / gradient_squared` is the noise scale: the batch size, in labels,
    beyond which larger batches help less ("An Empirical Model of Large-Batch Training", 2018, appendix A.1).

    Args:
        norm: norm of the gradient of a batch.
        norms: [accumulate], norms of the gradients of its micro-batches; 0 for one without labels.
        labels: [accumulate], numbers of labels of the micro-batches.
    """
    present = labels > 0
    of_parts, of_batch = (norms**2).mean(where=present), norm**2
    small, big = 1 / (1 / labels).mean(where=present), labels.sum()  # micro-batches add variance / labels to |G|^2
    difference = jnp.where(present.sum() > 1, big - small, jnp.inf)  # no estimates if one micro-batch has all labels
    return {
        "gradient_squared": (big * of_batch - small * of_parts) / difference,
        "gradient_variance": (of_parts - of_batch) * small * big / difference,
    }
