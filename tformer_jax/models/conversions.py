"""Converts parameters between equivalent forms of one model.

Layers may be unrolled or scanned, the output head tied or separate, attention projections separate or fused.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.config import ModelConfig, kinds
from tformer_jax.config.layers import FUSED

Params = dict[str, Any]


def convert_layers(params: Params, cfg: ModelConfig, *, scan_layers: bool) -> Params:
    """Converts parameters of a model built from `cfg` to the same model with the given `scan_layers`.

    Also converts optimizer moments and other trees with the structure of the parameters.
    """
    if scan_layers == cfg.scan_layers:
        return params
    change = _stack if scan_layers else _unstack
    period = cfg.period
    depths = {"encoder": cfg.encoder_layers, "decoder": cfg.decoder_layers}
    return params | {name: change(params[name], depth, period) for name, depth in depths.items() if name in params}


def unrolled(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Returns the same model with unrolled layers, as decoding requires."""
    return dataclasses.replace(cfg, scan_layers=False), convert_layers(params, cfg, scan_layers=False)


def untied(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Returns the same model with a separate output kernel [D, V], which is faster on a CPU than a table [V, D].

    A classifier has no output embedding, whatever its `tie_embeddings`.
    """
    remaining = {"output": "none", "all": "inputs"}
    if cfg.family == "classifier" or cfg.tie_embeddings not in remaining:
        return cfg, params
    table = params["target_embedding" if cfg.family == "seq2seq" else "embedding"]["embedding"]
    head = {**params.get("head", {}), "kernel": table.T}
    return dataclasses.replace(cfg, tie_embeddings=remaining[cfg.tie_embeddings]), {**params, "head": head}


def convert_projections(params: Params, cfg: ModelConfig, layout: str) -> Params:
    """Converts parameters of a model built from `cfg` to the same model with `attention_projections=layout`.

    Also converts parts of a model, down to one self-attention; other parameters are unchanged.
    """
    return _convert_tree(params, cfg, layout, cross=False)


def fused(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Returns the same model with `fused_qkv` projections, if it has all three and all or none of them have a bias."""
    biased = {"query", "key", "value"} & set(cfg.attention_bias)
    if cfg.attention not in kinds.Users(kinds.ATTENTIONS, "attention_projections") or len(biased) in (1, 2):
        return cfg, params
    return dataclasses.replace(cfg, attention_projections="fused_qkv"), convert_projections(params, cfg, "fused_qkv")


def in_layout_of(target: ModelConfig, cfg: ModelConfig, params: Params) -> Params:
    """Converts parameters of a model built from `cfg` to the layout of another model, so that both can be compared.

    Projections are separate or fused as in `target`. A tied source embedding or output head is copied if `target` has a
    separate one. Layers are always unrolled, so that their numbers can be compared, even if `target` scans them.
    Nothing else changes: shapes, depths and names may still differ.
    """
    if target.family == "seq2seq" and cfg.ties_inputs and not target.ties_inputs:
        params = params | {"source_embedding": jax.tree.map(jnp.copy, params["target_embedding"])}
    if target.tie_embeddings in ("none", "inputs"):
        cfg, params = untied(cfg, params)
    cfg, params = unrolled(cfg, params)
    if (target.attention, target.attention_bias) == (cfg.attention, cfg.attention_bias):
        params = convert_projections(params, cfg, target.attention_projections)
    return params


def fuse_projections(params: Params, names: tuple[str, ...], fused: str) -> Params:
    """Replaces the projections `names` of one layer by one named `fused`, with their heads concatenated."""
    others = {name: value for name, value in params.items() if name not in names}
    leaves = params[names[0]].keys()
    return others | {fused: {leaf: jnp.concatenate([params[n][leaf] for n in names], axis=-2) for leaf in leaves}}


def split_projection(params: Params, fused: str, heads: dict[str, int]) -> Params:
    """Inverts `fuse_projections`; `heads` is the number of heads of each projection, in order."""
    others = {name: value for name, value in params.items() if name != fused}
    start = 0
    for name, count in heads.items():
        part = slice(start, start + count)
        others[name] = {leaf: array[..., part, :] for leaf, array in params[fused].items()}
        start += count
    return others


def _stack(stack: Params, depth: int, period: int) -> Params:
    """Stacks the parameters of an encoder's or decoder's layers over repetitions of `period` layers."""
    repetitions = depth // period
    if not repetitions:
        return stack
    scanned = [[f"layers_{r * period + offset}" for r in range(repetitions)] for offset in range(period)]
    periods = {
        f"layers_{offset}": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(stack[name] for name in names))
        for offset, names in enumerate(scanned)
    }
    stacked = {name for names in scanned for name in names}
    return {name: value for name, value in stack.items() if name not in stacked} | {"periods": periods}


def _unstack(stack: Params, depth: int, period: int) -> Params:
    """Inverts `_stack`, also for a tree that has only some of the parameters."""
    layers = {
        f"layers_{repetition * period + int(name.removeprefix('layers_'))}": jax.tree.map(
            lambda leaf, repetition=repetition: leaf[repetition], layer
        )
        for name, layer in stack.get("periods", {}).items()
        for repetition in range(depth // period)
    }
    return {name: value for name, value in stack.items() if name != "periods"} | layers


def _convert_tree(params: Params, cfg: ModelConfig, layout: str, cross: bool) -> Params:
    """Converts all attentions of a tree; cross-attention cannot fuse its queries, which have another input."""
    if "output" in params and {"query", "qkv"} & params.keys():
        return _convert_attention(params, cfg, "fused_kv" if cross and layout == "fused_qkv" else layout)
    return {
        name: _convert_tree(value, cfg, layout, name == "cross_attention") if isinstance(value, dict) else value
        for name, value in params.items()
    }


def _convert_attention(params: Params, cfg: ModelConfig, layout: str) -> Params:
    """Splits the fused projections of an attention, and fuses the projections that `layout` fuses."""
    heads = {"query": cfg.num_heads, "key": cfg.kv_heads, "value": cfg.kv_heads}
    for present in FUSED:
        if (fused := _fused_name(present)) in params:
            params = split_projection(params, fused, {name: heads[name] for name in FUSED[present]})
    return fuse_projections(params, FUSED[layout], _fused_name(layout)) if FUSED[layout] else params


def _fused_name(layout: str) -> str:
    return layout.removeprefix("fused_")
