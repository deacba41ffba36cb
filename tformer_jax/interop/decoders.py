"""Hugging Face's decoder-only language models without experts: GPT-2, Llama and models with similar layers."""

import math
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
    shortest_pattern,
    their_fields,
    transformers_activation,
)
from tformer_jax.interop.mapping import (
    AFFINE,
    FLAT,
    NORM,
    SAME,
    Layout,
    Part,
    Rule,
    attention_parts,
    kernel,
    parts,
    rules_below,
    untransposed,
)
from tformer_jax.interop.rotary import max_length, rotary_fields, rotary_settings

_GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "max_length",
    "n_embd": "dim",
    "n_layer": "decoder_layers",
    "n_head": "num_heads",
    "activation_function": "activation",
    "layer_norm_epsilon": "norm_eps",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "init_std",
}


def _gpt2_settings(hf: Settings) -> Settings:
    require(hf, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, is_causal=True)
    return our_settings(_GPT2_FIELDS, hf) | {
        "family": "decoder_lm",
        "ffn_dim": hf.get("n_inner") or 4 * hf["n_embd"],
        "attention_projections": "fused_qkv",
        "attention_scale": None if hf["scale_attn_weights"] else 1.0,
        "position": "learned",
        "scale_embeddings": False,
        "initializer": "normal",
        "scale_residual_init": True,
    }


def _gpt2_config(cfg: ModelConfig) -> Settings:
    return their_fields(_GPT2_FIELDS, cfg) | {
        "n_inner": cfg.ffn_dim,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(cfg.activation, transformers_activation(cfg.activation)),
        "scale_attn_weights": cfg.attention_scale is None or math.isclose(cfg.attention_scale, cfg.head_size**-0.5),
        "embd_pdrop": cfg.dropout,
        "tie_word_embeddings": cfg.tie_embeddings == "output",
    }


def gpt2_rules(linear: Callable[..., Layout]) -> tuple[Rule, ...]:
    """Returns the rules of models with GPT-2's names; `linear` makes the layout of a kernel with some input axes."""
    affine = (("kernel", "weight", linear()), ("bias", "bias", FLAT))
    layer = (
        *parts("self_attention_residual/norm", "ln_1", NORM),
        *parts("self_attention/qkv", "attn.c_attn", affine),
        ("self_attention/output/kernel", "attn.c_proj.weight", linear(2)),
        ("self_attention/output/bias", "attn.c_proj.bias", SAME),
        *parts("ffn_residual/norm", "ln_2", NORM),
        *parts("ffn/expand", "mlp.c_fc", affine),
        *parts("ffn/contract", "mlp.c_proj", affine),
    )
    return (
        Rule("embedding/embedding", "transformer.wte.weight"),
        Rule("input/positions/embedding", "transformer.wpe.weight"),
        Rule("head/kernel", "lm_head.weight", kernel()),
        *rules_below("decoder/norm/", "transformer.ln_f.", NORM),
        *rules_below("decoder/layers_{i}/", "transformer.h.{i}.", layer),
    )


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


def llama_rules(*layer: Part) -> tuple[Rule, ...]:
    """Returns the rules of models with Llama's names, given the parts of a layer."""
    return (
        Rule("embedding/embedding", "model.embed_tokens.weight"),
        Rule("head/kernel", "lm_head.weight", kernel()),
        *rules_below("decoder/norm/", "model.norm.", NORM),
        *rules_below("decoder/layers_{i}/", "model.layers.{i}.", layer),
    )


_LLAMA_FIELDS = {
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


def llama_settings(hf: Settings, *, partial: bool = False, window_base: float | None = None) -> Settings:
    """Returns our settings of Llama; `partial` and `window_base` are as for `rotary_settings`."""
    require(hf, is_causal=True)
    rotary = rotary_settings(hf, partial=partial, window_base=window_base)
    return our_settings(_LLAMA_FIELDS, hf) | {
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
    return llama_settings(hf, partial=partial) | {"attention_bias": (), "ffn_bias": False}


def same_window_settings(hf: Settings) -> Settings:
    """Returns our settings for layers that all have windows if there is a window, or else none."""
    return {} if hf.get("sliding_window") is None else {"window": hf["sliding_window"], "layer_pattern": ("window",)}


def check_windows(hf: Settings, windows: bool, otherwise: str) -> None:
    """Raises `UserError` if `layer_types` has another length, or windows although the architecture has none here."""
    kinds = read_layer_types(hf)
    check(windows or "sliding_attention" not in kinds, f"layer_types has sliding_attention, but {otherwise}")


def _qwen_settings(hf: Settings) -> Settings:
    """Returns our settings; with `use_sliding_window`, for `layer_types` or the layers from `max_window_layers` on."""
    depth, used = hf["num_hidden_layers"], hf["use_sliding_window"]
    check_windows(hf, used, "use_sliding_window is false")
    first = hf["max_window_layers"] if used and hf.get("sliding_window") is not None else depth
    layers = read_layer_types(hf, *["full"] * first, *["sliding"] * (depth - first))
    return llama_settings(hf) | window_settings(hf, layers) | {"ffn_bias": False}


def _smollm3_settings(hf: Settings) -> Settings:
    """Returns our settings; layers with 0 in `no_rope_layers`, or every n-th layer, have no positions."""
    require(hf, use_sliding_window=False)
    layers, interval = range(hf["num_hidden_layers"]), hf["no_rope_layer_interval"]
    rotated = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in layers]
    check(len(rotated) >= len(layers), f"no_rope_layers has the length {len(rotated)} for {len(layers)} layers")
    full = {*read_layer_types(hf, "full")} == {"full_attention"}
    check(full, "layer_types with sliding_attention are not supported for this architecture")
    check(any(rotated[: len(layers)]), "no_rope_layers without a layer that has positions are not supported")
    return llama_settings(hf) | {"layer_pattern": shortest_pattern(["full" if rotated[i] else "nope" for i in layers])}


def _stablelm_settings(hf: Settings) -> Settings:
    require(hf, qk_layernorm=False, use_parallel_residual=False)
    require(hf, head_dim=hf["hidden_size"] // hf["num_attention_heads"])
    return llama_settings(hf, partial=True) | {
        "norm": "layernorm",
        "norm_eps": hf["layer_norm_eps"],
        "attention_bias": ("query", "key", "value") if hf["use_qkv_bias"] else (),
        "head_dim": None,
        "ffn_bias": False,
    }


def rotary_by_kind(hf: Settings, settings: Settings) -> Settings:
    """Returns our settings without the rotation of a kind of layer that the model does not have.

    Raises:
        UserError: `rope_parameters` are not given by kind of layer.
    """
    kinds = hf.get("rope_parameters")
    by_kind = not kinds or bool({"full_attention", "sliding_attention"} & {*kinds})
    check(by_kind, "rope_parameters must be given for full_attention and sliding_attention")
    rotary = dict(settings["rotary"])
    if "window" not in settings:
        rotary.pop("window_base", None)
    elif "window_base" in rotary and "full" not in settings["layer_pattern"]:
        rotary = {"base": rotary["window_base"], "fraction": rotary["fraction"]}
    return settings | {"rotary": rotary}


def llama_config(cfg: ModelConfig) -> Settings:
    """Returns their settings of Llama."""
    return their_fields(_LLAMA_FIELDS, cfg) | {
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
    return llama_config(cfg) | {"sliding_window": cfg.window}


def windows_config(cfg: ModelConfig) -> Settings:
    """Returns their settings of an architecture whose `layer_types` are windows or full."""
    return mistral_config(cfg) | {"layer_types": layer_types(cfg, cfg.decoder_layers)}


def _qwen_config(cfg: ModelConfig) -> Settings:
    windows = {"sliding_window": cfg.window, "use_sliding_window": cfg.window is not None}
    return llama_config(cfg) | windows | {"layer_types": layer_types(cfg, cfg.decoder_layers)}


def _smollm3_config(cfg: ModelConfig) -> Settings:
    rotated = [int(kind != "nope") for kind in cfg.layer_kinds(cfg.decoder_layers)]
    return llama_config(cfg) | {"no_rope_layers": rotated}


def _stablelm_config(cfg: ModelConfig) -> Settings:
    return llama_config(cfg) | {
        "layer_norm_eps": cfg.norm_eps,
        "use_qkv_bias": "query" in cfg.attention_bias,
        **rotary_fields(cfg.rotary, partial=True),
    }


_INPUT_BIASES = {"attention_bias": ("query", "key", "value")}
_GPT2 = gpt2_rules(untransposed)
DENSE = llama_rules(*ATTENTION, *GATED, *PRE_NORMS)

_EMBEDDING = "model.embed_tokens.weight"
BUFFERS = (r".*\.attn\.(masked_)?bias", r".*rotary_emb\.inv_freq")


def llama_like(
    name: str,
    settings: Callable,
    config: Callable,
    rules: tuple[Rule, ...] | Callable[[ModelConfig], tuple[Rule, ...]] = DENSE,
    **options: Any,
) -> Architecture:
    """Returns an architecture with Llama's names; `options` are further fields of it."""
    options = {"ignored": BUFFERS, "prefix": "model.", "shared": _EMBEDDING} | options
    return Architecture(name, settings, config, rules if callable(rules) else lambda cfg: rules, **options)


DECODERS = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _gpt2_settings,
        _gpt2_config,
        lambda cfg: _GPT2,
        BUFFERS,
        "transformer.",
        shared="transformer.wte.weight",
        projections="fused_qkv",
    ),
    "llama": llama_like("LlamaForCausalLM", llama_settings, llama_config),
    "mistral": llama_like("MistralForCausalLM", mistral_settings, mistral_config),
    "qwen2": llama_like("Qwen2ForCausalLM", lambda hf: _qwen_settings(hf) | _INPUT_BIASES, _qwen_config),
    "qwen3": llama_like("Qwen3ForCausalLM", lambda hf: _qwen_settings(hf) | {"qk_norm": True}, _qwen_config),
    "smollm3": llama_like("SmolLM3ForCausalLM", _smollm3_settings, _smollm3_config),
    "stablelm": llama_like("StableLmForCausalLM", _stablelm_settings, _stablelm_config),
}
