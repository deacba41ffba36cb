"""How parameters come to carry the names of their logical axes."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn


def named(init: Callable[..., Any], *axes: str | None) -> Callable[..., Any]:
    """An initializer whose arrays know their logical axes, for `parallel.rules` to place on the mesh."""
    return nn.with_logical_partitioning(init, axes)
