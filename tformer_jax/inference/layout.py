"""Conversion of a model to the parameter layout that decodes fastest on this device."""

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from tformer_jax.config import kinds
from tformer_jax.models import conversions, registry
from tformer_jax.models.ensemble import Ensemble
from tformer_jax.nn.linear import operand_dtype
from tformer_jax.nn.quantized import is_quantized
from tformer_jax.nn.xla import decodes_from_copy

_Key = tuple[Any, Any, tuple[int, ...]]
_converted: dict[_Key, tuple[Any, Any]] = {}
"""Converted model and parameters by the model, the dtype of operands and the ids of arrays.

They are removed when a replaced array is freed.
"""

_quantize = jax.jit(registry.quantized, static_argnums=0)


def decoding_layout(model: Any, params: Any) -> tuple[Any, Any]:
    """Unrolls scanned layers and stores kernels as `model.cfg.quantization` says.

    On CPUs, it also unties the output head, fuses projections unless kernels are stored as int8, and rounds the kernels
    that every product would round to bfloat16. There, and with int8, calls with the same arrays return the same result
    without another copy.
    """
    if isinstance(model, Ensemble):
        members, member_params = zip(*map(decoding_layout, model.members, params), strict=True)
        return dataclasses.replace(model, members=members), member_params
    if not (decodes_from_copy() or model.cfg.quantization):
        return unroll_layers(model, params)
    leaves = jax.tree.leaves(params)
    key = model, _operands(model), tuple(map(id, leaves))
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
    stored = any(map(is_quantized, flatten_dict(params).values()))
    if decodes_from_copy():
        cfg, params = conversions.untied(model.cfg, params)
        if not stored:
            cfg, params = conversions.fused(cfg, params)
        model = type(model)(cfg)
        if _operands(model) == jnp.bfloat16 and not (model.cfg.quantization or stored):
            params = _with_bfloat16_kernels(model, params)
    if model.cfg.quantization and not stored:
        params = _quantize(model, params)
    return model, params


def _operands(model: Any) -> Any:
    return operand_dtype(jnp.dtype(model.cfg.dtype))


def _with_bfloat16_kernels(model: Any, params: Any) -> Any:
    """Rounds the kernels that only `Linear` layers and the output head multiply by."""
    attentions = (kinds.load(kinds.ATTENTIONS, name) for name in model.cfg.attentions)
    others = {layer for attention in attentions for layer in getattr(attention, "absorbed", ())}
    kernels = {path for path in registry.linear_kernels(model) if path[-2] not in others} | {("head", "kernel")}
    leaves = flatten_dict(params).items()
    return unflatten_dict({path: leaf.astype(jnp.bfloat16) if path in kernels else leaf for path, leaf in leaves})


def quantized_layout(model: Any, params: Any, quantization: str) -> tuple[Any, Any]:
    """Returns a model with `cfg.quantization`, unrolled, and its parameters with the kernels of layers as int8.

    Raises:
        UserError: a kind of the model does not support it, or a package is missing.
    """
    model, params = unroll_layers(model, params)
    model = registry.build(dataclasses.replace(model.cfg, quantization=quantization))
    return model, _quantize(model, params)


def unroll_layers(model: Any, params: Any) -> tuple[Any, Any]:
    """Returns the model and its parameters with unrolled layers."""
    cfg, params = conversions.unrolled(model.cfg, params)
    return type(model)(cfg), params
