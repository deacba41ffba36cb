"""The kinds that a config can name, and where they are implemented, one line each.

An entry is `module:attribute`, imported when a model uses it, or the object itself. Code outside this package adds a
kind by assigning to the dictionary before the config is built.
"""

import pkgutil
from typing import Any, NamedTuple

Kinds = dict[str, Any]

ATTENTIONS: Kinds = {
    "multi_head": "tformer_jax.nn.attention:Attention",
    "basic": "tformer_jax.nn.attention:BasicAttention",
    "mla": "tformer_jax.nn.latent_attention:LatentAttention",
    "gated_delta": "tformer_jax.nn.gated_delta:GatedDelta",
}
RECURRENT = {"gated_delta"}
"""Kinds of attention with a recurrent state instead of keys and values."""
LAYERS: dict[str, str | None] = {"full": None, "window": None, "nope": None, "gated_delta": "gated_delta"}
"""Kinds of layers, and the kind of attention of each; None: `model.attention`."""


class Limit(NamedTuple):
    """Values of a setting of `model` that layers of one kind of attention support."""

    setting: str
    allowed: tuple[Any, ...]
    reason: str
    lifted: bool = False
    """Whether other values are allowed if only some layers are of this kind."""


LIMITS: dict[str, tuple[Limit, ...]] = {
    "basic": (Limit("parameterization", ("standard",), "has no scale of the scores"),),
    "mla": (Limit("parameterization", ("standard",), "has no rule for latents"),),
    "gated_delta": (
        Limit("family", ("decoder_lm",), "a recurrent state only reads earlier tokens"),
        Limit("prefix_lm", (False,), "a recurrent state only reads earlier tokens"),
        Limit("parameterization", ("standard",), "has no rule for recurrent states"),
        Limit("window", (None,), "a recurrent state has no window", lifted=True),
        Limit("attention_backend", ("auto", "reference"), "a recurrence has one implementation", lifted=True),
        Limit(
            "position",
            ("none", "sinusoidal", "sinusoidal_halves", "learned"),
            "a recurrence has no scores",
            lifted=True,
        ),
    ),
}
"""Limits by kind of attention; `ModelConfig` rejects other values."""
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
    "rotary": "tformer_jax.nn.attention_positions:Rotary",
    "alibi": "tformer_jax.nn.attention_positions:Alibi",
    "relative": "tformer_jax.nn.attention_positions:RelativeBuckets",
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
EMBEDDING_POOLINGS = (*POOLINGS, "max", "mean_sqrt", "weighted_mean")
"""Poolings of embeddings: also the maximum, the sum divided by the square root of the number of tokens, and the mean
with the position of a token as its weight, 1 for the first one."""


def load(kinds: Kinds, name: str) -> Any:
    """Returns the object that `name` stands for in `kinds`.

    Raises:
        KeyError: `kinds` has no such name.
    """
    entry = kinds[name]
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry
