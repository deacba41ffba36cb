"""Which parameters are matrices of a layer, and which of their axes are inputs and outputs."""

from collections.abc import Sequence

from optax import contrib

from tformer_jax import axes

MATRIX_AXES = {axes.EMBED, axes.HEADS, axes.KV_HEADS, axes.HEAD_DIM, axes.MLP}
STACKED_AXES = {axes.LAYERS, axes.EXPERTS}
"""Axes along which a parameter stacks several matrices."""


def matrix_axes(names: Sequence[str | None]) -> contrib.MuonDimensionNumbers | None:
    """Returns the input (reduction) and output axes of a parameter; None if it is not a matrix of a layer."""
    kept = [axis for axis, name in enumerate(names) if name not in STACKED_AXES]
    inner = [names[axis] for axis in kept]
    if len(inner) < 2 or not set(inner) <= MATRIX_AXES or axes.EMBED not in (inner[0], inner[-1]):
        return None
    split = 1 if inner[0] == axes.EMBED else len(kept) - 1
    return contrib.MuonDimensionNumbers(tuple(kept[:split]), tuple(kept[split:]))
