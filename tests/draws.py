"""Draws complete model configs and inputs at random from all valid settings."""

import dataclasses
from typing import Any

import numpy as np

from tests.helpers import tiny, with_own_stacks
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.config.layers import PROJECTIONS
from tformer_jax.models import registry
from tformer_jax.special_tokens import PAD

V, T, GARBAGE = 11, 8, 9
LENGTHS = (5, 3, 1)
"""Row lengths in tokens; the shorter rows are also prefixes of the first."""
SHAPES = "xxxxx...", "...xxxxx", "x..xx.xx"
"""The positions of five tokens in a row of eight, marked by x."""


def pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def _attention(rng) -> dict[str, Any]:
    heads = int(pick(rng, 1, 2, 4))
    projections = pick(rng, "separate", "fused_qkv", "fused_kv")
    biases = {
        "separate": ((), ("output",), ("value",), ("query", "key", "value"), ("query", "key", "value", "output")),
        "fused_kv": ((), ("query",), ("key", "value"), ("query", "key", "value", "output")),
        "fused_qkv": ((), ("output",), ("query", "key", "value"), ("query", "key", "value", "output")),
    }[projections]
    return {
        "attention": pick(rng, *["multi_head"] * 8, "basic", "mla"),
        "num_heads": heads,
        "num_kv_heads": pick(rng, None, 1, max(heads // 2, 1)),
        "head_dim": pick(rng, None, 4, 6),
        "attention_projections": projections,
        "attention_bias": pick(rng, *biases),
        "attention_scale": pick(rng, None, None, 0.3, 1.0),
        "attention_softcap": pick(rng, None, None, 2.0),
        "qk_norm": pick(rng, False, False, True),
        "attention_backend": pick(rng, "auto", "reference", "xla", "blockwise"),
        "attention_sinks": pick(rng, False, False, True),
        "layer_pattern": pick(
            rng, ("full",), ("full",), ("window", "full"), ("window",), ("nope", "full"), ("gated_delta", "full")
        ),
    }


def _positions(rng) -> dict[str, Any]:
    rotary = {"pairing": pick(rng, "halves", "interleaved"), "base": pick(rng, 10_000.0, 50.0)}
    rotary["fraction"] = pick(rng, 1.0, 1.0, 0.5)
    rotary |= pick(
        rng,
        {},
        {"scaling": "linear", "factor": 2.0},
        {"scaling": "llama3", "factor": 4.0, "original_length": 8},
        {"scaling": "yarn", "factor": 4.0, "original_length": 64},
    )
    return pick(
        rng,
        {"position": "none"},
        {"position": "sinusoidal"},
        {"position": pick(rng, "sinusoidal_halves", "sinusoidal_fairseq")},
        {"position": "learned", "position_offset": int(pick(rng, 0, 2))},
        {"position": "rotary", "rotary": rotary},
        {"position": "rotary", "rotary": rotary},
        {"position": "alibi"},
        {
            "position": "relative",
            "relative": {
                "buckets": int(pick(rng, 4, 8)),
                "distance": int(pick(rng, 5, 9)),
                "by_layer": bool(pick(rng, False, True)),
            },
        },
    )


def _ffn(rng) -> dict[str, Any]:
    experts = int(pick(rng, 2, 3, 4))
    settings = {
        "ffn": pick(rng, "mlp", "gated", "moe"),
        "ffn_bias": pick(rng, True, False),
        "activation": pick(rng, "relu", "relu_squared", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "sigmoid"),
    }
    moe = {
        "num_experts": experts,
        "experts_per_token": int(rng.integers(1, experts + 1)),
        "expert_gated": pick(rng, True, False),
        "expert_capacity": pick(rng, None, 0.5, 1.0, 0.0),
        "router_normalize": pick(rng, True, False),
        "router_z_loss": pick(rng, 0.0, 0.1),
        **pick(rng, {}, {}, {"every": 2, "dense_dim": 7}, {"dense_layers": 1}),
        **pick(rng, {}, {"shared_dim": 5}, {"shared_dim": 5, "shared_gate": True}),
    }
    return settings | ({"moe": moe} if settings["ffn"] == "moe" else {})


def _rest(rng, family: str) -> dict[str, Any]:
    ties = ("none", "output", "inputs", "all") if family == "seq2seq" else ("none", "output")
    norm = pick(rng, "layernorm", "rmsnorm")
    depths = {"encoder_layers": int(pick(rng, 1, 2, 3)), "decoder_layers": int(pick(rng, 1, 2, 3))}
    return with_own_stacks(family, depths) | {
        "norm": norm,
        "norm_placement": pick(rng, "pre", "post", "both"),
        "norm_bias": pick(rng, True, False) or norm == "rmsnorm",
        "norm_unit_offset": pick(rng, False, False, True),
        "final_norm": pick(rng, None, True, False),
        "embedding_norm": pick(rng, False, True),
        "tie_embeddings": pick(rng, *ties),
        "scale_embeddings": pick(rng, True, False),
        "output_bias": pick(rng, True, False) and family != "classifier",
        "scale_output": pick(rng, False, True),
        "output_softcap": pick(rng, None, None, 3.0),
        "prefix_lm": family == "decoder_lm" and pick(rng, True, False, False),
        "lookahead": None if family == "decoder_lm" else pick(rng, None, None, 0, 2),
        "remat": pick(rng, "none", "nothing_saveable", "dots_saveable"),
        "scan_layers": pick(rng, False, True),
        **(
            {"pooling": pick(rng, "mean", "first", "last"), "pooler": pick(rng, True, False)}
            if family == "classifier"
            else {}
        ),
    }


_LLAMA = {
    "ffn": "gated",
    "ffn_bias": False,
    "activation": "silu",
    "attention_bias": (),
    "norm": "rmsnorm",
    "position": "rotary",
    "head_dim": 4,
    "scale_embeddings": False,
    "tie_embeddings": "none",
}
_GPT2 = {
    "attention_projections": "fused_qkv",
    "position": "learned",
    "activation": "gelu_tanh",
    "scale_embeddings": False,
}
_GEMMA = _LLAMA | {
    "norm_placement": "both",
    "norm_unit_offset": True,
    "scale_embeddings": True,
    "tie_embeddings": "output",
    "layer_pattern": ("window", "full"),
    "activation": "gelu_tanh",
}
PUBLISHED = (_LLAMA, _GPT2, _GEMMA, _LLAMA | {"ffn": "moe"}, _LLAMA | {"attention_bias": ("query", "key", "value")})
"""The settings of Llama, GPT-2, Gemma 2, Mixtral and Qwen 2."""


def _nearly_published(rng, settings: dict[str, Any]) -> dict[str, Any]:
    """Draws a published architecture with up to two changed settings, which a checkpoint may not be able to express."""
    names = sorted(set(settings) - {"prefix_lm", "scan_layers"})
    changed = {name: settings[name] for name in rng.permutation(names)[: rng.integers(3)]}
    remaining = {"attention": "multi_head", "num_heads": 4, "decoder_layers": 2}
    return remaining | pick(rng, *PUBLISHED) | changed | {"scan_layers": settings["scan_layers"]}


def config(rng: np.random.Generator) -> tuple[ModelConfig, int]:
    """Draws a valid config; also returns the number of draws that were refused before it."""
    for refused in range(1000):
        family = pick(rng, "decoder_lm", "decoder_lm", "seq2seq", "classifier")
        settings = _attention(rng) | _positions(rng) | _ffn(rng) | _rest(rng, family)
        if family == "decoder_lm" and rng.random() < 0.3:
            settings = _nearly_published(rng, settings)
        if "window" in settings.get("layer_pattern", ()):
            settings["window"] = int(pick(rng, 1, 2, 4))
        if settings["attention"] != "multi_head":
            settings |= {"num_kv_heads": None, "qk_norm": False, "attention_sinks": False}
            settings |= {"attention_projections": "separate", "attention_bias": PROJECTIONS}
        if settings["attention"] == "basic":
            settings |= {"num_heads": 1, "head_dim": None, "attention_scale": None, "attention_softcap": None}
        if settings["attention"] == "mla":
            sizes = {"query_latent_dim": pick(rng, None, 5), "value_dim": pick(rng, None, 3)}
            settings["mla"] = {"latent_dim": 6, "rotary_dim": 4, **sizes}
        try:
            cfg = tiny(family, **settings)
            registry.build(cfg)
        except UserError:
            continue
        return cfg, refused
    raise AssertionError("no config is allowed")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Rows of five tokens, and sources of five tokens for translation models."""

    rows: np.ndarray
    """int32 [3, 5]; none is PAD."""
    sources: np.ndarray
    prefix: int
    """Length of the prefix that all tokens attend to, for `prefix_lm`."""

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Inputs":
        rows, sources = rng.integers(4, V, (2, len(SHAPES), max(LENGTHS))).astype(np.int32)
        return cls(rows, sources, int(pick(rng, 1, 2, 3)))


def spread(rows: np.ndarray, shapes=SHAPES, fill: int = PAD) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 [B, 8] rows with tokens where the shape has an x, and a mask of the real tokens."""
    real = np.array([[character == "x" for character in shape] for shape in shapes])
    padded = np.full(real.shape, fill, np.int32)
    padded[real] = rows.reshape(-1)
    return padded, real
