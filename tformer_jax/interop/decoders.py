"""Hugging Face's decoder-only language models without experts: GPT-2, Llama and models with similar layers."""

import math
from collections.abc import Callable

from tformer_jax.config import ModelConfig
from tformer_jax.interop import llama
from tformer_jax.interop.architecture import (
    Architecture,
    Settings,
    check,
    layer_types,
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
    Rule,
    fused_rows,
    kernel,
    parts,
    rules_below,
    untransposed,
)
from tformer_jax.interop.rotary import rope_fields, rotary_fields, rotary_fields_by_kind

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


def _qwen_settings(hf: Settings) -> Settings:
    """Returns our settings; with `use_sliding_window`, for `layer_types` or the layers from `max_window_layers` on."""
    depth, used = hf["num_hidden_layers"], hf["use_sliding_window"]
    llama.check_windows(hf, used, "use_sliding_window is false")
    first = hf["max_window_layers"] if used and hf.get("sliding_window") is not None else depth
    layers = read_layer_types(hf, *["full"] * first, *["sliding"] * (depth - first))
    return llama.settings(hf) | llama.window_settings(hf, layers) | {"ffn_bias": False}


def _smollm3_settings(hf: Settings) -> Settings:
    """Returns our settings; layers with 0 in `no_rope_layers`, or every n-th layer, have no positions."""
    require(hf, use_sliding_window=False)
    layers, interval = range(hf["num_hidden_layers"]), hf["no_rope_layer_interval"]
    rotated = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in layers]
    check(len(rotated) >= len(layers), f"no_rope_layers has the length {len(rotated)} for {len(layers)} layers")
    full = {*read_layer_types(hf, "full")} == {"full_attention"}
    check(full, "layer_types with sliding_attention are not supported for this architecture")
    check(any(rotated[: len(layers)]), "no_rope_layers without a layer that has positions are not supported")
    return llama.settings(hf) | {"layer_pattern": shortest_pattern(["full" if rotated[i] else "nope" for i in layers])}


def _stablelm_settings(hf: Settings) -> Settings:
    require(hf, qk_layernorm=False, use_parallel_residual=False)
    require(hf, head_dim=hf["hidden_size"] // hf["num_attention_heads"])
    return llama.settings(hf, partial=True) | {
        "norm": "layernorm",
        "norm_eps": hf["layer_norm_eps"],
        "attention_bias": ("query", "key", "value") if hf["use_qkv_bias"] else (),
        "head_dim": None,
        "ffn_bias": False,
    }


def _qwen_config(cfg: ModelConfig) -> Settings:
    windows = {"sliding_window": cfg.window, "use_sliding_window": cfg.window is not None}
    return llama.config(cfg) | windows | {"layer_types": layer_types(cfg, cfg.decoder_layers)}


def _smollm3_config(cfg: ModelConfig) -> Settings:
    rotated = [int(kind != "nope") for kind in cfg.layer_kinds(cfg.decoder_layers)]
    return llama.config(cfg) | {"no_rope_layers": rotated}


def _stablelm_config(cfg: ModelConfig) -> Settings:
    return llama.config(cfg) | {
        "layer_norm_eps": cfg.norm_eps,
        "use_qkv_bias": "query" in cfg.attention_bias,
        **rotary_fields(cfg.rotary, partial=True),
    }


_INPUT_BIASES = {"attention_bias": ("query", "key", "value")}


_GPT2 = gpt2_rules(untransposed)


OLMO3_WINDOW_BASE = 500_000.0
"""Rotary base of OLMo 3's layers with windows, unless `rope_parameters` has it; other layers use `rope_theta`."""


CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _cwm_settings(hf: Settings) -> Settings:
    """Returns our settings; layers have full attention by `layer_types`, or else the first of each four."""
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf["rope_parameters"] = CWM_ROPE
    layers = read_layer_types(hf, "full", "sliding", "sliding", "sliding")
    return llama.settings(hf) | {"attention_bias": ()} | llama.window_settings(hf, layers)


def _seed_oss_settings(hf: Settings) -> Settings:
    inputs = ("query", "key", "value") if hf["attention_bias"] else ()
    output = ("output",) if hf["attention_out_bias"] else ()
    return llama.settings(hf) | {"attention_bias": inputs + output, "dropout": hf["residual_dropout"]}


def _phi3_settings(hf: Settings) -> Settings:
    """Returns our settings; their rotations have no scaling but "longrope", which depends on the length."""
    settings = llama.settings_without_biases(hf, partial=True)
    kind = settings["rotary"].get("scaling")
    check(kind is None, f"rotary scaling {kind!r} is not supported for this architecture")
    fused = {"attention_projections": "fused_qkv", "dropout": hf["resid_pdrop"]}
    return settings | llama.same_window_settings(hf) | fused


def _hunyuan_settings(hf: Settings) -> Settings:
    """Returns our settings; "dynamic" scaling with an `alpha` stretches the base, whatever the length."""
    require(hf, use_qk_norm=True, use_cla=False)
    rope, size = rope_fields(hf), hf.get("head_dim")
    require(hf, attention_head_dim=size)
    if "dynamic" in (rope.get("type"), rope.get("rope_type")) and rope.get("alpha"):
        size = size or hf["hidden_size"] // hf["num_attention_heads"]
        base = rope.get("rope_theta") or hf["rope_theta"]
        hf |= {"rope_scaling": None, "rope_parameters": {"rope_theta": base * rope["alpha"] ** (size / (size - 2))}}
    return llama.settings(hf) | {"ffn_bias": False, "qk_norm": True, "qk_norm_over": "rotated_heads"}


def _olmo2_settings(hf: Settings, *, window_base: float | None = None) -> Settings:
    settings = llama.settings(hf, window_base=window_base)
    return settings | {"ffn_bias": False, "norm_placement": "output", "qk_norm": True, "qk_norm_over": "width"}


def _olmo3_settings(hf: Settings) -> Settings:
    """Returns our settings; layers have full attention by `layer_types`, or else every fourth one."""
    layers = read_layer_types(hf, "sliding", "sliding", "sliding", "full")
    settings = _olmo2_settings(hf, window_base=OLMO3_WINDOW_BASE)
    return llama.rotary_by_kind(settings | llama.window_settings(hf, layers))


_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "output_divisor",
    "attention_multiplier": "attention_scale",
}


def _granite_settings(hf: Settings) -> Settings:
    return llama.settings(hf) | {ours: float(hf[theirs]) for theirs, ours in _MULTIPLIERS.items()}


def _seed_oss_config(cfg: ModelConfig) -> Settings:
    biases = {"attention_bias": "query" in cfg.attention_bias, "attention_out_bias": "output" in cfg.attention_bias}
    return llama.config(cfg) | biases | {"residual_dropout": cfg.dropout}


def _phi3_config(cfg: ModelConfig) -> Settings:
    return llama.mistral_config(cfg) | {"resid_pdrop": cfg.dropout, **rotary_fields(cfg.rotary, partial=True)}


def _granite_config(cfg: ModelConfig) -> Settings:
    values = {theirs: getattr(cfg, ours) for theirs, ours in _MULTIPLIERS.items()}
    return llama.config(cfg) | values | {"attention_multiplier": cfg.attention_scale or cfg.head_size**-0.5}


_MLP = (*parts("ffn/expand", "mlp.up_proj", AFFINE), *parts("ffn/contract", "mlp.down_proj", AFFINE))
_OUTPUT_NORMS = (
    *parts("self_attention_residual/norm", "post_attention_layernorm", NORM),
    *parts("ffn_residual/norm", "post_feedforward_layernorm", NORM),
)
_ROTATED_NORMS = (
    ("self_attention/query_norm/scale", "self_attn.query_layernorm.weight", SAME),
    ("self_attention/key_norm/scale", "self_attn.key_layernorm.weight", SAME),
)
_ARCEE = llama.rules(*llama.ATTENTION, *_MLP, *llama.PRE_NORMS)
_PHI3 = llama.rules(
    *parts("self_attention/qkv", "self_attn.qkv_proj", AFFINE), *llama.ATTENTION, *llama.GATED, *llama.PRE_NORMS
)
_PHI3_FUSED = fused_rows("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj")
_HUNYUAN = llama.rules(*_ROTATED_NORMS, *llama.ATTENTION, *llama.GATED, *llama.PRE_NORMS)
_OLMO = llama.rules(*llama.ATTENTION, *llama.GATED, *_OUTPUT_NORMS)

DECODERS = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _gpt2_settings,
        _gpt2_config,
        lambda cfg: _GPT2,
        llama.BUFFERS,
        "transformer.",
        shared="transformer.wte.weight",
        projections="fused_qkv",
        inputs_first=True,
    ),
    "llama": llama.architecture("LlamaForCausalLM", llama.settings, llama.config),
    "mistral": llama.architecture("MistralForCausalLM", llama.mistral_settings, llama.mistral_config),
    "qwen2": llama.architecture("Qwen2ForCausalLM", lambda hf: _qwen_settings(hf) | _INPUT_BIASES, _qwen_config),
    "qwen3": llama.architecture("Qwen3ForCausalLM", lambda hf: _qwen_settings(hf) | {"qk_norm": True}, _qwen_config),
    "smollm3": llama.architecture("SmolLM3ForCausalLM", _smollm3_settings, _smollm3_config),
    "stablelm": llama.architecture("StableLmForCausalLM", _stablelm_settings, _stablelm_config),
    "ministral": llama.architecture("MinistralForCausalLM", llama.mistral_settings, llama.windows_config),
    "cwm": llama.architecture("CwmForCausalLM", _cwm_settings, llama.windows_config),
    "arcee": llama.architecture(
        "ArceeForCausalLM", lambda hf: llama.settings(hf) | {"ffn": "mlp"}, llama.config, _ARCEE
    ),
    "seed_oss": llama.architecture("SeedOssForCausalLM", _seed_oss_settings, _seed_oss_config),
    "phi3": llama.architecture(
        "Phi3ForCausalLM", _phi3_settings, _phi3_config, _PHI3, fused=lambda cfg: _PHI3_FUSED, projections="fused_qkv"
    ),
    "hunyuan_v1_dense": llama.architecture("HunYuanDenseV1ForCausalLM", _hunyuan_settings, llama.config, _HUNYUAN),
    "olmo2": llama.architecture("Olmo2ForCausalLM", _olmo2_settings, llama.config, _OLMO),
    "olmo3": llama.architecture(
        "Olmo3ForCausalLM",
        _olmo3_settings,
        lambda cfg: llama.windows_config(cfg) | rotary_fields_by_kind(cfg.rotary),
        _OLMO,
    ),
    "granite": llama.architecture("GraniteForCausalLM", _granite_settings, _granite_config),
}
