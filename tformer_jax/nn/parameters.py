"""Initializers with logical axis names."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn


def named(init: Callable[..., Any], *axes: str | None) -> Callable[..., Any]:
    """Adds logical axis names to an initializer, by which `parallel.rules` shards the parameters."""
    return nn.with_logical_partitioning(init, axes)
