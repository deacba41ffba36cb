"""Converts parameters between separate and fused attention projections, so that either model can load them."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from tformer_jax.config import ModelConfig

Params = dict[str, Any]


FUSED = {"separate": (), "fused_qkv": ("query", "key", "value"), "fused_kv": ("key", "value")}
"""Projections that each value of `attention_projections` fuses into one."""


def convert(params: Params, cfg: ModelConfig, kind: str) -> Params:
    """Converts parameters of a model built from `cfg` to the same model with `attention_projections=kind`.

    Also converts parts of a model, down to one self-attention; other parameters are unchanged.
    """
    return _convert(params, cfg, kind, cross=False)


def fused(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Returns the same model with `fused_qkv` projections, if it has all three and all or none of them have a bias."""
    biased = {"query", "key", "value"} & set(cfg.attention_bias)
    if cfg.attention == "basic" or len(biased) in (1, 2):
        return cfg, params
    return dataclasses.replace(cfg, attention_projections="fused_qkv"), convert(params, cfg, "fused_qkv")


def fuse(params: Params, names: tuple[str, ...], fused: str) -> Params:
    """Replaces the projections `names` of one layer by one named `fused`, with their heads concatenated."""
    others = {name: value for name, value in params.items() if name not in names}
    leaves = params[names[0]].keys()
    return others | {fused: {leaf: jnp.concatenate([params[n][leaf] for n in names], axis=-2) for leaf in leaves}}


def split(params: Params, fused: str, heads: dict[str, int]) -> Params:
    """Inverts `fuse`; `heads` is the number of heads of each projection, in order."""
    others = {name: value for name, value in params.items() if name != fused}
    start = 0
    for name, count in heads.items():
        part = slice(start, start + count)
        others[name] = {leaf: array[..., part, :] for leaf, array in params[fused].items()}
        start += count
    return others


def _convert(params: Params, cfg: ModelConfig, kind: str, cross: bool) -> Params:
    if "output" in params:
        return _convert_layer(params, cfg, "fused_kv" if cross and kind == "fused_qkv" else kind)
    return {
        name: _convert(value, cfg, kind, name == "cross_attention") if isinstance(value, dict) else value
        for name, value in params.items()
    }


def _convert_layer(params: Params, cfg: ModelConfig, kind: str) -> Params:
    heads = {"query": cfg.num_heads, "key": cfg.kv_heads, "value": cfg.kv_heads}
    for present in FUSED:
        if (fused := _fused_name(present)) in params:
            params = split(params, fused, {name: heads[name] for name in FUSED[present]})
    return fuse(params, FUSED[kind], _fused_name(kind)) if FUSED[kind] else params


def _fused_name(kind: str) -> str:
    return kind.removeprefix("fused_")
