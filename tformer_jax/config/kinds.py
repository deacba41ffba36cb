"""The kinds that a config can name, and where they are implemented, one line each.

An entry is `module:attribute`, imported when a model uses it, or the object itself. Code outside this package adds a
kind by assigning to the dictionary before the config is built.
"""

import importlib
from typing import Any

Kinds = dict[str, Any]

ATTENTIONS: Kinds = {
    "multi_head": "tformer_jax.nn.attention:Attention",
    "basic": "tformer_jax.nn.attention:BasicAttention",
}
BACKENDS: Kinds = {
    "auto": "tformer_jax.nn.attention_ops.select:AUTO",
    "reference": "tformer_jax.nn.attention_ops.reference:REFERENCE",
    "xla": "tformer_jax.nn.attention_ops.dot_product:XLA",
    "cudnn": "tformer_jax.nn.attention_ops.dot_product:CUDNN",
    "blockwise": "tformer_jax.nn.attention_ops.blockwise:BLOCKWISE",
    "pallas": "tformer_jax.nn.attention_ops.pallas:PALLAS",
    "splash": "tformer_jax.nn.attention_ops.splash:SPLASH",
    "ring": "tformer_jax.nn.attention_ops.ring:RING",
}
POSITIONS: Kinds = {
    "none": "tformer_jax.nn.positions:NoPositions",
    "sinusoidal": "tformer_jax.nn.positions:Sinusoidal",
    "sinusoidal_halves": "tformer_jax.nn.positions:SinusoidalHalves",
    "learned": "tformer_jax.nn.positions:Learned",
    "rotary": "tformer_jax.nn.relative:Rotary",
    "alibi": "tformer_jax.nn.relative:Alibi",
    "relative": "tformer_jax.nn.relative:RelativeBuckets",
}
NORMS: Kinds = {
    "layernorm": "tformer_jax.nn.norms:LayerNorm",
    "rmsnorm": "tformer_jax.nn.norms:RMSNorm",
}
FFNS: Kinds = {
    "mlp": "tformer_jax.nn.ffn:FFN",
    "gated": "tformer_jax.nn.ffn:GatedFFN",
    "moe": "tformer_jax.nn.moe:MixtureOfExperts",
}
ACTIVATIONS: Kinds = {
    "relu": "tformer_jax.nn.activations:relu",
    "relu_squared": "tformer_jax.nn.activations:relu_squared",
    "gelu": "tformer_jax.nn.activations:gelu",
    "gelu_tanh": "tformer_jax.nn.activations:gelu_tanh",
    "silu": "tformer_jax.nn.activations:silu",
    "sigmoid": "tformer_jax.nn.activations:sigmoid",
}
POOLINGS = ("mean", "first", "last")
"""Poolings over the tokens of a text."""


def load(kinds: Kinds, name: str) -> Any:
    """Returns the object that `name` stands for in `kinds`."""
    entry = kinds[name]
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    return getattr(importlib.import_module(module), attribute)
