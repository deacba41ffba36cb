"""Base class of the modules that have parameters, the names of parameters, and values that modules expose."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen as nn

from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig

WATCHED = "watch"
"""Collection of the values that `watch` exposes."""
NO_DROPOUT_KEY = (
    "train=True draws dropout masks: pass rngs={'dropout': jax.random.key(0)}, or set the rates of dropout to 0"
)


def parameter_name(path: Any) -> str:
    """Returns the name of a leaf, such as `encoder/layers_0/ffn/expand/kernel`, given its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each leaf, and the leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield parameter_name(path), leaf


def check_vectors(name: str, x: jax.Array, size: int) -> None:
    """Raises `UserError` if x is not [batch, tokens, size]."""
    if x.ndim != 3 or x.shape[-1] != size:
        hint = f", as {name}[None]" if x.ndim == 2 and x.shape[-1] == size else ""
        raise UserError(f"{name} has the shape {x.shape}: pass [batch, tokens, {size}]{hint}")


class Module(nn.Module):
    """A Linen module whose `param` does not trace the initializer of a parameter that exists.

    Flax traces the initializer in every call to compare shapes, which takes about a tenth of the time to trace a model.

    Raises:
        UserError: the field `cfg` of a subclass is not a `ModelConfig`.
    """

    def __post_init__(self) -> None:
        if "cfg" in type(self).__dataclass_fields__:
            check_type(f"cfg of {type(self).__name__}", self.cfg, ModelConfig, "a ModelConfig")
        super().__post_init__()

    @nn.nowrap
    def dropout_key(self) -> jax.Array:
        """Returns a new key of the "dropout" stream.

        Raises:
            UserError: `apply` was called without that stream.
        """
        if not self.has_rng("dropout"):
            raise UserError(NO_DROPOUT_KEY)
        return self.make_rng("dropout")

    @nn.nowrap
    def param(self, name: str, init_fn: Callable[..., Any], shape: tuple[int, ...], *init_args: Any) -> Any:  # type: ignore[override]
        """Returns the parameter `name`, which `init_fn(key, shape, *init_args)` initializes.

        Raises:
            flax.errors.ScopeParamShapeError: the parameter has another shape.
        """
        existing = nn.unbox(self.get_variable("params", name))
        return (
            existing
            if existing is not None and existing.shape == shape
            else super().param(name, init_fn, shape, *init_args)
        )


def watch(module: nn.Module, **values: Any) -> None:
    """Exposes intermediate values, which are pytrees, in the collection "watch" if that is requested.

    `model.apply(..., mutable=["watch"])` also returns the collection, a tree by module name. Without it, nothing is
    computed or stored: the traced program is the same. `inference.watch` reads the collection.

    =====================  ============  ==================================================================
    module                 name          value
    =====================  ============  ==================================================================
    attention              `operands`    `attention_ops.Operands`, after norms, rotation and KV cache
    `Residual`             `stream`      [B, T, D], the residual stream before the sub-layer
    `Residual`             `added`       [B, T, D], what the sub-layer adds to it, before dropout
    `Stack`                `stream`      [B, T, D], the residual stream after all layers
    =====================  ============  ==================================================================

    Each value is in a tuple, as `flax.linen.Module.sow` stores it: of one element, or with `model.shared_layers` of one
    for each use of the layer. Scanned layers have a leading axis of repetitions in each leaf. Attention to a paged KV
    cache is not watched, and neither is `LatentAttention` with a cache.
    """
    if module.is_mutable_collection(WATCHED) and not module.is_initializing():
        for name, value in values.items():
            module.sow(WATCHED, name, value)
