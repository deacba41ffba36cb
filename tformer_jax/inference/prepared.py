"""A model in the layout that decodes fastest on this device, converted once for all engines that decode with it."""

import weakref
from typing import Any

import jax

from tformer_jax.nn import layouts, projections

Key = tuple[Any, tuple[int, ...]]
_converted: dict[Key, tuple[Any, Any]] = {}
"""By the model and the identities of its arrays: what they were converted to, while all of them live."""


def prepared(model: Any, params: Any) -> tuple[Any, Any]:
    """The model and its parameters with layers in a loop; on CPUs also with fused projections and an untied head.

    On CPUs, whose memory is large, calls with the same arrays give the same result without another copy.
    """
    if jax.default_backend() != "cpu":
        return _in_a_loop(model, params)
    leaves = jax.tree.leaves(params)
    key = model, tuple(map(id, leaves))
    if key not in _converted:
        result = _convert(model, params)
        kept = set(map(id, jax.tree.leaves(result[1])))
        replaced = [leaf for leaf in leaves if id(leaf) not in kept]
        if not replaced:
            return result
        _converted[key] = result
        for leaf in replaced:
            weakref.finalize(leaf, _converted.pop, key, None)
    return _converted[key]


def _convert(model: Any, params: Any) -> tuple[Any, Any]:
    model, params = _in_a_loop(model, params)
    cfg, params = projections.fused(*layouts.untied(model.cfg, params))
    return type(model)(cfg), params


def _in_a_loop(model: Any, params: Any) -> tuple[Any, Any]:
    cfg, params = layouts.unrolled(model.cfg, params)
    return type(model)(cfg), params
