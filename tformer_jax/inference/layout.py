"""Conversion of a model to the parameter layout that decodes fastest on this device."""

import weakref
from typing import Any

import jax

from tformer_jax.models import conversions
from tformer_jax.nn.xla import decodes_with_fused_weights

Key = tuple[Any, tuple[int, ...]]
_converted: dict[Key, tuple[Any, Any]] = {}
"""Converted model and parameters by the model and the ids of its arrays; removed when a replaced array is freed."""


def decoding_layout(model: Any, params: Any) -> tuple[Any, Any]:
    """Unrolls scanned layers; on CPUs, also fuses projections and unties the output head.

    On CPUs, which have much memory, calls with the same arrays return the same result without another copy.
    """
    if not decodes_with_fused_weights():
        return unroll_layers(model, params)
    leaves = jax.tree.leaves(params)
    key = model, tuple(map(id, leaves))
    if key not in _converted:
        result = _convert_for_decoding(model, params)
        shared = set(map(id, jax.tree.leaves(result[1])))
        replaced = [leaf for leaf in leaves if id(leaf) not in shared]
        if not replaced:
            return result
        _converted[key] = result
        for leaf in replaced:
            weakref.finalize(leaf, _converted.pop, key, None)
    return _converted[key]


def _convert_for_decoding(model: Any, params: Any) -> tuple[Any, Any]:
    model, params = unroll_layers(model, params)
    cfg, params = conversions.fused(*conversions.untied(model.cfg, params))
    return type(model)(cfg), params


def unroll_layers(model: Any, params: Any) -> tuple[Any, Any]:
    """Returns the model and its parameters with unrolled layers."""
    cfg, params = conversions.unrolled(model.cfg, params)
    return type(model)(cfg), params
