"""Base class of the modules that have parameters."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn


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
        found = nn.unbox(self.get_variable("params", name))
        return found if found is not None and found.shape == shape else super().param(name, init_fn, shape, *init_args)
