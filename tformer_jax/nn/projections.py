"""Converts the parameters of one attention layer between separate and fused projections."""

from typing import Any

import jax.numpy as jnp

Params = dict[str, Any]


def fuse(params: Params, names: tuple[str, ...], fused: str) -> Params:
    """Replaces the projections `names` by one called `fused`, their heads side by side.

    `fuse(params, ("query", "key", "value"), "qkv")` makes a layer for `attention_projections="fused_qkv"`,
    `fuse(params, ("key", "value"), "kv")` one for `"fused_kv"`.
    """
    rest = {name: value for name, value in params.items() if name not in names}
    leaves = params[names[0]].keys()
    return rest | {fused: {leaf: jnp.concatenate([params[n][leaf] for n in names], axis=-2) for leaf in leaves}}


def split(params: Params, fused: str, heads: dict[str, int]) -> Params:
    """The inverse of `fuse`; `heads` gives each projection's number of heads, in order."""
    rest = {name: value for name, value in params.items() if name != fused}
    start = 0
    for name, count in heads.items():
        part = slice(start, start + count)
        rest[name] = {leaf: array[..., part, :] for leaf, array in params[fused].items()}
        start += count
    return rest
