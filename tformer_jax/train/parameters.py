"""Names and axes of parameters, by which settings and optimizers choose them; and those that training changes."""

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Sequence
from typing import Any

import flax
from optax import contrib

from tformer_jax import axes
from tformer_jax.config.fields import Section
from tformer_jax.config.layers import FUSED
from tformer_jax.nn.quantized import stored_arrays

SCANNED = re.compile("/periods/layers_[0-9]+/")
"""Part of the name of each parameter that stacks the parameters of several layers (`nn.stacks.Stack`)."""


def match_globs(section: Section, setting: str, glob: str, names: Sequence[str]) -> list[str]:
    """Returns the names of parameters that a glob of a setting matches.

    Raises:
        UserError: it matches none, or would match only a part of a parameter: some of the layers of a scan, or some
            of several fused projections.
    """
    for name in names:
        for parts, what, remedy in _parts(name, glob, names):
            if len({fnmatch.fnmatch(part, glob) for part in parts}) > 1:
                raise section.error(
                    setting,
                    f"{glob!r} depends on the {what}, but {name!r} holds the parameters of several; {remedy}",
                )
    matches = fnmatch.filter(names, glob)
    if not matches:
        raise section.error(setting, f"{glob!r} matches no parameter name, such as {names[0]!r}")
    return matches


def _parts(name: str, glob: str, names: Sequence[str]) -> Iterator[tuple[list[str], str, str]]:
    """Yields names of the parts of a parameter, what distinguishes them, and what to write instead of `glob`."""
    if SCANNED.search(name) and "periods" not in glob:
        stack = name.partition("/")[0]
        unscanned = {number for other in names for number in re.findall(f"^{stack}/layers_([0-9]+)/", other)}
        numbers = {*re.findall("[0-9]+", glob), "0", "1", "10", "100"} - unscanned
        parts = [SCANNED.sub(f"{place}/layers_{number}/", name) for number in numbers for place in ("/periods", "")]
        yield parts, "layer", "set model.scan_layers=False, or write periods/layers_ in the glob to match all of them"
    for kind, projections in FUSED.items():
        fused = kind.removeprefix("fused_")
        if f"/{fused}/" in name and fused not in glob:
            parts = [name, *(name.replace(f"/{fused}/", f"/{part}/") for part in projections)]
            yield parts, "projection", "set model.attention_projections='separate'"


MATRIX_AXES = {axes.EMBED, axes.HEADS, axes.KV_HEADS, axes.HEAD_DIM, axes.MLP}
STACKED_AXES = {axes.LAYERS, axes.EXPERTS}
"""Axes along which a parameter stacks several matrices."""


def matrix_axes(names: Sequence[str | None]) -> contrib.MuonDimensionNumbers | None:
    """Returns the input (reduction) and output axes of a parameter; None if it is not a matrix of a layer."""
    own = [axis for axis, name in enumerate(names) if name not in STACKED_AXES]
    inner = [names[axis] for axis in own]
    if len(inner) < 2 or not set(inner) <= MATRIX_AXES or axes.EMBED not in (inner[0], inner[-1]):
        return None
    split = 1 if inner[0] == axes.EMBED else len(own) - 1
    return contrib.MuonDimensionNumbers(tuple(own[:split]), tuple(own[split:]))


@flax.struct.dataclass
class Adapted:
    """Parameters with LoRA (`train.lora`); training changes only `trainable`."""

    base: Any
    """All parameters of the model, unchanged."""
    trainable: Any
    """`a` and `b` below the name of each adapted kernel, float32; and parameters that are trained as they are."""
    scale: float = flax.struct.field(pytree_node=False)
    """alpha / r."""
    dtype: str = flax.struct.field(pytree_node=False, default="float32")
    """Dtype of the kernels of the adapted model that are stored as int8."""


def kernel_name(name: str) -> str:
    """Returns the name of a factor's kernel, and other names unchanged."""
    return re.sub("/[ab]$", "", name)


def trainable(params: Any) -> Any:
    """Returns the trainable parameters of a model."""
    return params.trainable if isinstance(params, Adapted) else params


def base(params: Any) -> Any:
    """Returns the parameters of the model before it is adapted, as they are stored."""
    return stored_arrays(params.base) if isinstance(params, Adapted) else params


def with_trainable(params: Any, new: Any) -> Any:
    """Replaces the trainable parameters."""
    return dataclasses.replace(params, trainable=new) if isinstance(params, Adapted) else new
