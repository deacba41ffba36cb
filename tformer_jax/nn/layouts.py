"""Converts parameters between layouts of one model: looped or scanned layers, tied or separate output head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.config import ModelConfig

Params = dict[str, Any]


def convert(params: Params, cfg: ModelConfig, *, scan_layers: bool) -> Params:
    """Converts parameters of a model built from `cfg` to the same model with the given `scan_layers`.

    Also converts optimizer moments and other trees with the structure of the parameters.
    """
    if scan_layers == cfg.scan_layers:
        return params
    change = _stack if scan_layers else _unstack
    period = len(cfg.layer_pattern)
    depths = {"encoder": cfg.encoder_layers, "decoder": cfg.decoder_layers}
    return params | {name: change(params[name], depth, period) for name, depth in depths.items() if name in params}


def unrolled(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Returns the same model with looped layers, as decoding requires."""
    return dataclasses.replace(cfg, scan_layers=False), convert(params, cfg, scan_layers=False)


def untied(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Returns the same model with a separate output kernel [D, V], which is faster on a CPU than a table [V, D]."""
    kinds = {"output": "none", "all": "inputs"}
    if cfg.tie_embeddings not in kinds:
        return cfg, params
    table = params["target_embedding" if cfg.family == "seq2seq" else "embedding"]["embedding"]
    head = {**params.get("head", {}), "kernel": table.T}
    return dataclasses.replace(cfg, tie_embeddings=kinds[cfg.tie_embeddings]), {**params, "head": head}


def _stack(stack: Params, depth: int, period: int) -> Params:
    repetitions = depth // period
    if not repetitions:
        return stack
    periods = {
        f"layers_{offset}": jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *(stack[f"layers_{r * period + offset}"] for r in range(repetitions))
        )
        for offset in range(period)
    }
    scanned = repetitions * period
    remaining = {f"layers_{number - scanned}": stack[f"layers_{number}"] for number in range(scanned, depth)}
    return _others(stack) | {"periods": periods} | remaining


def _unstack(stack: Params, depth: int, period: int) -> Params:
    scanned = depth // period * period
    layers = {
        f"layers_{number}": jax.tree.map(
            lambda leaf, repetition=number // period: leaf[repetition], stack["periods"][f"layers_{number % period}"]
        )
        for number in range(scanned)
    }
    remaining = {f"layers_{number}": stack[f"layers_{number - scanned}"] for number in range(scanned, depth)}
    return _others(stack) | layers | remaining


def _others(stack: Params) -> Params:
    return {name: value for name, value in stack.items() if name != "periods" and not name.startswith("layers_")}
