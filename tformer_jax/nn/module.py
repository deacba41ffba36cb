"""Base class of the modules that have parameters, and the names of parameters."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen as nn


def parameter_name(path: Any) -> str:
    """Returns the name of a leaf, such as `encoder/layers_0/ffn/expand/kernel`, given its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each leaf, and the leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield parameter_name(path), leaf


class Module(nn.Module):
    """A Linen module whose `param` does not trace the initializer of a parameter that exists.

    Flax traces it in every call, to compare the shapes, which takes about a tenth of the tracing of a model.
    """

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
