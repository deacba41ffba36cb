"""Converts parameters between separate and fused attention projections, so that each kind loads the others' weights."""

from typing import Any

import jax.numpy as jnp

from tformer_jax.config import ModelConfig

Params = dict[str, Any]


def convert(params: Params, cfg: ModelConfig, kind: str) -> Params:
    """Parameters of a model built from `cfg`, for the same model with `attention_projections=kind`.

    Any part of a model will do, down to one self-attention; what is no projection stays as it is.
    """
    return _convert(params, cfg, kind, cross=False)


def _convert(params: Params, cfg: ModelConfig, kind: str, cross: bool) -> Params:
    if "query" in params or "qkv" in params:
        return _fuse(_separate(params, cfg), "fused_kv" if cross and kind == "fused_qkv" else kind)
    return {
        name: _convert(value, cfg, kind, name == "cross_attention") if isinstance(value, dict) else value
        for name, value in params.items()
    }


def _separate(params: Params, cfg: ModelConfig) -> Params:
    if "qkv" in params:
        return _split(params, "qkv", {"query": cfg.num_heads, "key": cfg.kv_heads, "value": cfg.kv_heads})
    if "kv" in params:
        return _split(params, "kv", {"key": cfg.kv_heads, "value": cfg.kv_heads})
    return params


def _fuse(params: Params, kind: str) -> Params:
    """Puts the heads of separate projections side by side."""
    names = {"separate": (), "fused_kv": ("key", "value"), "fused_qkv": ("query", "key", "value")}[kind]
    if not names:
        return params
    rest = {name: value for name, value in params.items() if name not in names}
    leaves = {leaf: jnp.concatenate([params[name][leaf] for name in names], axis=-2) for leaf in params[names[0]]}
    return rest | {kind.removeprefix("fused_"): leaves}


def _split(params: Params, fused: str, heads: dict[str, int]) -> Params:
    """The inverse; `heads` gives each projection's number of heads, in order."""
    result = {name: value for name, value in params.items() if name != fused}
    start = 0
    for name, count in heads.items():
        result[name] = {leaf: array[..., start : start + count, :] for leaf, array in params[fused].items()}
        start += count
    return result
