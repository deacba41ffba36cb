"""Converts parameters between layouts of one model: a loop over layers or a scan, a tied or a separate output head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.config import ModelConfig

Params = dict[str, Any]


def convert(params: Params, cfg: ModelConfig, *, scan_layers: bool) -> Params:
    """Parameters of a model built from `cfg`, for the same model with `scan_layers` as given.

    Optimizer moments and any other tree shaped like the parameters will do as well.
    """
    if scan_layers == cfg.scan_layers:
        return params
    change = _stack if scan_layers else _unstack
    period = len(cfg.layer_pattern)
    depths = {"encoder": cfg.encoder_layers, "decoder": cfg.decoder_layers}
    return params | {name: change(params[name], depth, period) for name, depth in depths.items() if name in params}


def unrolled(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same model as a loop, which decoding needs."""
    return dataclasses.replace(cfg, scan_layers=False), convert(params, cfg, scan_layers=False)


def untied(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same model with a kernel [D, V] for the logits, which a CPU multiplies faster than a table [V, D]."""
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
        f"layers_{place}": jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *(stack[f"layers_{r * period + place}"] for r in range(repetitions))
        )
        for place in range(period)
    }
    scanned = repetitions * period
    rest = {f"layers_{number - scanned}": stack[f"layers_{number}"] for number in range(scanned, depth)}
    return _others(stack) | {"periods": periods} | rest


def _unstack(stack: Params, depth: int, period: int) -> Params:
    scanned = depth // period * period
    layers = {
        f"layers_{number}": jax.tree.map(
            lambda leaf, repetition=number // period: leaf[repetition], stack["periods"][f"layers_{number % period}"]
        )
        for number in range(scanned)
    }
    rest = {f"layers_{number}": stack[f"layers_{number - scanned}"] for number in range(scanned, depth)}
    return _others(stack) | layers | rest


def _others(stack: Params) -> Params:
    return {name: value for name, value in stack.items() if name != "periods" and not name.startswith("layers_")}
