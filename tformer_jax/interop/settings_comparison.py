"""Compares configs: a written checkpoint must define the same function of the same parameters."""

import math
from operator import attrgetter
from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.nn.gated_delta import Sizes

ALWAYS = (
    *("family", "vocab_size", "max_length", "dim", "attention", "num_heads", "kv_heads", "head_size", "attention_bias"),
    *(
        "attention_projections",
        "attention_softcap",
        "attention_sinks",
        "attention_gate",
        "qk_norm",
        "qk_norm_over",
        "lookahead",
        "prefix_lm",
        "position",
        "ffn",
        "ffn_dim",
        "activation",
    ),
    *("ffn_bias", "norm", "norm_placement", "norm_eps", "norm_unit_offset", "has_final_norm", "embedding_norm"),
    *("first_norm", "shared_layers", "embedding_dim"),
    *("tie_embeddings", "scale_embeddings", "output_bias", "scale_output", "output_softcap", "width_factor"),
    *("embedding_multiplier", "residual_multiplier", "output_divisor"),
)
"""Settings that matter to every model. Settings of training, precision and backends are not compared."""
ONLY_FOR: dict[tuple[str, Any], tuple[str, ...]] = {
    ("family", "seq2seq"): ("encoder_layers", "decoder_layers", "source_vocab_size"),
    ("family", "decoder_lm"): ("decoder_layers",),
    ("family", "classifier"): ("encoder_layers", "num_classes", "token_types", "pooling", "pooler", "head_transform"),
    ("pooler", True): ("pooler_activation",),
    ("family", "masked_lm"): ("encoder_layers", "token_types", "head_transform"),
    ("head_transform", True): ("transform_bias", "head_activation"),
    ("position", "learned"): ("position_offset",),
    ("position", "sinusoidal_fairseq"): ("position_offset",),
    ("position", "rotary"): ("rotary.pairing", "rotary.base", "rotary_size", "rotary.scaling", "rotary.factor"),
    ("rotary.scaling", "llama3"): ("rotary.original_length",),
    ("rotary.scaling", "yarn"): (
        *("rotary.original_length", "rotary.beta_fast", "rotary.beta_slow", "rotary.attention_factor"),
        "rotary.rounded",
    ),
    ("position", "relative"): ("relative.buckets", "relative.distance", "relative.by_layer"),
    ("ffn", "moe"): (
        *("moe.num_experts", "moe.experts_per_token", "moe.expert_gated", "moe.router_normalize", "moe.shared_dim"),
        *("moe.shared_gate", "moe.router_scores", "moe.router_bias", "moe.router_factor", "moe.gate_limit"),
        *("moe.groups", "moe.groups_per_token", "moe.group_top"),
    ),
    ("attention", "mla"): ("mla.latent_dim", "mla.query_latent_dim", "mla.rotary_dim", "value_size"),
    ("norm", "layernorm"): ("norm_bias",),
}
"""Settings that matter only if another setting has the given value."""


def differences(cfg: ModelConfig, other: ModelConfig) -> list[str]:
    """Returns the settings in which two models differ, as `model.name=value` of the first model."""
    mine, others = _compared_settings(cfg), _compared_settings(other)
    return [f"model.{name}={value!r}" for name, value in mine.items() if not _values_equal(value, others.get(name))]


def _compared_settings(cfg: ModelConfig) -> dict[str, Any]:
    names = [
        *ALWAYS,
        *(name for (kind, value), more in ONLY_FOR.items() if attrgetter(kind)(cfg) == value for name in more),
    ]
    facts = {name: attrgetter(name)(cfg) for name in names}
    facts["attention_bias"] = tuple(sorted(cfg.attention_bias))
    facts["attention_scale"] = cfg.attention_scale or 1 / math.sqrt(cfg.score_size)
    depth = max(cfg.depths)
    facts["layer_pattern"] = cfg.layer_kinds(depth)
    if cfg.ffn == "moe":
        experts = facts["layers with experts"] = tuple(map(cfg.has_experts, range(depth)))
        facts["moe.dense_dim"] = None if all(experts) else cfg.moe.dense_dim or cfg.ffn_dim
    if "gated_delta" in facts["layer_pattern"]:
        facts["gated_delta"] = (*Sizes.resolve(cfg), cfg.gated_delta.conv_kernel_size)
    if "window" in facts["layer_pattern"]:
        facts["window"] = cfg.window
        if cfg.position == "rotary":
            unscaled = cfg.rotary.base if cfg.rotary.scaling == "none" else "scaled"
            facts["rotary.window_base"] = cfg.rotary.window_base or unscaled
    return facts


def _values_equal(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-9)
    return bool(value == other)
