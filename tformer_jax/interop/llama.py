"""Parts of the decoder-only architectures with Llama's names, and their windows and rotations."""

from collections.abc import Callable
from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import (
    Architecture,
    Settings,
    check,
    layer_types,
    our_layer_pattern,
    our_settings,
    read_layer_types,
    require,
    their_fields,
)
from tformer_jax.interop.mapping import (
    AFFINE,
    NORM,
    SAME,
    Part,
    Rule,
    attention_parts,
    kernel,
    parts,
    rules_below,
)
from tformer_jax.interop.rotary import max_length, rotary_fields, rotary_settings

ATTENTION = (
    *attention_parts("self_attention", (f"self_attn.{name}_proj" for name in "qkvo")),
    ("self_attention/query_norm/scale", "self_attn.q_norm.weight", SAME),
    ("self_attention/key_norm/scale", "self_attn.k_norm.weight", SAME),
)


GATED = (
    *parts("ffn/gate", "mlp.gate_proj", AFFINE),
    *parts("ffn/expand", "mlp.up_proj", AFFINE),
    *parts("ffn/contract", "mlp.down_proj", AFFINE),
)


PRE_NORMS = (
    *parts("self_attention_residual/norm", "input_layernorm", NORM),
    *parts("ffn_residual/norm", "post_attention_layernorm", NORM),
)


def rules(*layer: Part) -> tuple[Rule, ...]:
    """Returns the rules of models with Llama's names, given the parts of a layer."""
    return (
        Rule("embedding/embedding", "model.embed_tokens.weight"),
        Rule("head/kernel", "lm_head.weight", kernel()),
        *rules_below("decoder/norm/", "model.norm.", NORM),
        *rules_below("decoder/layers_{i}/", "model.layers.{i}.", layer),
    )


_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation",
    "rms_norm_eps": "norm_eps",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_std",
}


def settings(hf: Settings, *, partial: bool = False, window_base: float | None = None) -> Settings:
    """Returns our settings of Llama; `partial` and `window_base` are as for `rotary_settings`."""
    require(hf, is_causal=True)
    rotary = rotary_settings(hf, partial=partial, window_base=window_base)
    return our_settings(_FIELDS, hf) | {
        "family": "decoder_lm",
        "max_length": max_length(hf, rotary),
        "num_kv_heads": hf.get("num_key_value_heads"),
        "head_dim": hf.get("head_dim"),
        "attention_bias": ("query", "key", "value", "output") if hf.get("attention_bias") else (),
        "ffn": "gated",
        "ffn_bias": bool(hf.get("mlp_bias")),
        "norm": "rmsnorm",
        "scale_embeddings": False,
        "dropout": 0.0,
        "initializer": "normal",
        "position": "rotary",
        "rotary": rotary,
    }


def window_settings(hf: Settings, kinds: list[str]) -> Settings:
    """Returns our settings for layers of the kinds "sliding_attention" and "full_attention"."""
    pattern, size = our_layer_pattern(kinds, "sliding", "full"), hf.get("sliding_window")
    if "window" not in pattern:
        return {}
    check(size is not None, "layer_types has sliding_attention, but sliding_window is null")
    return {"window": size, "layer_pattern": pattern}


def mistral_settings(hf: Settings) -> Settings:
    """Returns our settings of Mistral: no biases, and windows by `layer_types`, or else in all layers or none.

    For `layer_types`, AutoModel of transformers 5 reads Mistral as Ministral.
    """
    default = "full" if hf.get("sliding_window") is None else "sliding"
    return settings_without_biases(hf) | window_settings(hf, read_layer_types(hf, default))


def settings_without_biases(hf: Settings, *, partial: bool = False) -> Settings:
    """Returns our settings of Llama for an architecture without biases."""
    return settings(hf, partial=partial) | {"attention_bias": (), "ffn_bias": False}


def same_window_settings(hf: Settings) -> Settings:
    """Returns our settings for layers that all have windows if there is a window, or else none."""
    return {} if hf.get("sliding_window") is None else {"window": hf["sliding_window"], "layer_pattern": ("window",)}


def check_windows(hf: Settings, windows: bool, otherwise: str) -> None:
    """Raises `UserError` if `layer_types` has another length, or windows although the architecture has none here."""
    kinds = read_layer_types(hf)
    check(windows or "sliding_attention" not in kinds, f"layer_types has sliding_attention, but {otherwise}")


def rotary_by_kind(settings: Settings) -> Settings:
    """Returns our settings without the rotation of a kind of layer that the model does not have."""
    rotary = dict(settings["rotary"])
    if "window" not in settings:
        rotary.pop("window_base", None)
    elif "window_base" in rotary and "full" not in settings["layer_pattern"]:
        rotary = {"base": rotary["window_base"], "fraction": rotary["fraction"]}
    return settings | {"rotary": rotary}


def config(cfg: ModelConfig) -> Settings:
    """Returns their settings of Llama."""
    return their_fields(_FIELDS, cfg) | {
        "max_position_embeddings": cfg.max_length,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_size,
        "attention_bias": "output" in cfg.attention_bias,
        "mlp_bias": cfg.ffn_bias,
        "tie_word_embeddings": cfg.tie_embeddings == "output",
        **rotary_fields(cfg.rotary),
    }


def mistral_config(cfg: ModelConfig) -> Settings:
    """Returns their settings of Mistral."""
    return config(cfg) | {"sliding_window": cfg.window}


def windows_config(cfg: ModelConfig) -> Settings:
    """Returns their settings of an architecture whose `layer_types` are windows or full, and which needs a window."""
    return config(cfg) | {
        "sliding_window": cfg.window or cfg.max_length,
        "layer_types": layer_types(cfg, cfg.decoder_layers),
    }


DENSE = rules(*ATTENTION, *GATED, *PRE_NORMS)


_EMBEDDING = "model.embed_tokens.weight"


BUFFERS = (r".*\.attn\.(masked_)?bias", r".*rotary_emb\.inv_freq")


def architecture(
    name: str,
    settings: Callable,
    config: Callable,
    rules: tuple[Rule, ...] | Callable[[ModelConfig], tuple[Rule, ...]] = DENSE,
    **options: Any,
) -> Architecture:
    """Returns an architecture with Llama's names; `options` are further fields of it."""
    options = {"ignored": BUFFERS, "prefix": "model.", "shared": _EMBEDDING} | options
    return Architecture(name, settings, config, rules if callable(rules) else lambda cfg: rules, **options)
