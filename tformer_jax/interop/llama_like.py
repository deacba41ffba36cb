"""Hugging Face's decoder-only language models that differ from Llama in a norm, a mask, an activation or a layout."""

from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import Settings, check, read_layer_types, require
from tformer_jax.interop.decoders import (
    ATTENTION,
    GATED,
    PRE_NORMS,
    llama_config,
    llama_like,
    llama_rules,
    llama_settings,
    mistral_config,
    mistral_settings,
    rotary_by_kind,
    same_window_settings,
    settings_without_biases,
    window_settings,
    windows_config,
)
from tformer_jax.interop.mapping import AFFINE, NORM, SAME, fused_rows, parts
from tformer_jax.interop.rotary import rope_fields, rotary_fields, rotary_fields_by_kind

OLMO3_WINDOW_BASE = 500_000.0
"""Rotary base of OLMo 3's layers with windows, unless `rope_parameters` has it; `rope_theta` is that of the others."""


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
    return llama_settings(hf) | {"attention_bias": ()} | window_settings(hf, layers)


def _seed_oss_settings(hf: Settings) -> Settings:
    inputs = ("query", "key", "value") if hf["attention_bias"] else ()
    output = ("output",) if hf["attention_out_bias"] else ()
    return llama_settings(hf) | {"attention_bias": inputs + output, "dropout": hf["residual_dropout"]}


def _phi3_settings(hf: Settings) -> Settings:
    """Returns our settings; their rotations have no scaling but "longrope", which depends on the length."""
    settings = settings_without_biases(hf, partial=True)
    kind = settings["rotary"].get("scaling")
    check(kind is None, f"rotary scaling {kind!r} is not supported for this architecture")
    fused = {"attention_projections": "fused_qkv", "dropout": hf["resid_pdrop"]}
    return settings | same_window_settings(hf) | fused


def _hunyuan_settings(hf: Settings) -> Settings:
    """Returns our settings; "dynamic" scaling with an `alpha` stretches the base, whatever the length."""
    require(hf, use_qk_norm=True, use_cla=False)
    rope, size = rope_fields(hf), hf.get("head_dim")
    require(hf, attention_head_dim=size)
    if "dynamic" in (rope.get("type"), rope.get("rope_type")) and rope.get("alpha"):
        size = size or hf["hidden_size"] // hf["num_attention_heads"]
        base = rope.get("rope_theta") or hf["rope_theta"]
        hf |= {"rope_scaling": None, "rope_parameters": {"rope_theta": base * rope["alpha"] ** (size / (size - 2))}}
    return llama_settings(hf) | {"ffn_bias": False, "qk_norm": True, "qk_norm_over": "rotated_heads"}


def _olmo2_settings(hf: Settings, *, window_base: float | None = None) -> Settings:
    settings = llama_settings(hf, window_base=window_base)
    return settings | {"ffn_bias": False, "norm_placement": "output", "qk_norm": True, "qk_norm_over": "width"}


def _olmo3_settings(hf: Settings) -> Settings:
    """Returns our settings; layers have full attention by `layer_types`, or else every fourth one."""
    layers = read_layer_types(hf, "sliding", "sliding", "sliding", "full")
    settings = _olmo2_settings(hf, window_base=OLMO3_WINDOW_BASE)
    return rotary_by_kind(hf, settings | window_settings(hf, layers))


_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "output_divisor",
    "attention_multiplier": "attention_scale",
}


def _granite_settings(hf: Settings) -> Settings:
    return llama_settings(hf) | {ours: float(hf[theirs]) for theirs, ours in _MULTIPLIERS.items()}


def _seed_oss_config(cfg: ModelConfig) -> Settings:
    biases = {"attention_bias": "query" in cfg.attention_bias, "attention_out_bias": "output" in cfg.attention_bias}
    return llama_config(cfg) | biases | {"residual_dropout": cfg.dropout}


def _phi3_config(cfg: ModelConfig) -> Settings:
    return mistral_config(cfg) | {"resid_pdrop": cfg.dropout, **rotary_fields(cfg.rotary, partial=True)}


def _granite_config(cfg: ModelConfig) -> Settings:
    values = {theirs: getattr(cfg, ours) for theirs, ours in _MULTIPLIERS.items()}
    return llama_config(cfg) | values | {"attention_multiplier": cfg.attention_scale or cfg.head_size**-0.5}


_MLP = (*parts("ffn/expand", "mlp.up_proj", AFFINE), *parts("ffn/contract", "mlp.down_proj", AFFINE))
_OUTPUT_NORMS = (
    *parts("self_attention_residual/norm", "post_attention_layernorm", NORM),
    *parts("ffn_residual/norm", "post_feedforward_layernorm", NORM),
)
_ROTATED_NORMS = (
    ("self_attention/query_norm/scale", "self_attn.query_layernorm.weight", SAME),
    ("self_attention/key_norm/scale", "self_attn.key_layernorm.weight", SAME),
)
_ARCEE = llama_rules(*ATTENTION, *_MLP, *PRE_NORMS)
_PHI3 = llama_rules(*parts("self_attention/qkv", "self_attn.qkv_proj", AFFINE), *ATTENTION, *GATED, *PRE_NORMS)
_PHI3_FUSED = fused_rows("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj")
_HUNYUAN = llama_rules(*_ROTATED_NORMS, *ATTENTION, *GATED, *PRE_NORMS)
_OLMO = llama_rules(*ATTENTION, *GATED, *_OUTPUT_NORMS)

LLAMA_LIKE = {
    "ministral": llama_like("MinistralForCausalLM", mistral_settings, windows_config),
    "cwm": llama_like("CwmForCausalLM", _cwm_settings, windows_config),
    "arcee": llama_like("ArceeForCausalLM", lambda hf: llama_settings(hf) | {"ffn": "mlp"}, llama_config, _ARCEE),
    "seed_oss": llama_like("SeedOssForCausalLM", _seed_oss_settings, _seed_oss_config),
    "phi3": llama_like(
        "Phi3ForCausalLM", _phi3_settings, _phi3_config, _PHI3, fused=lambda cfg: _PHI3_FUSED, projections="fused_qkv"
    ),
    "hunyuan_v1_dense": llama_like("HunYuanDenseV1ForCausalLM", _hunyuan_settings, llama_config, _HUNYUAN),
    "olmo2": llama_like("Olmo2ForCausalLM", _olmo2_settings, llama_config, _OLMO),
    "olmo3": llama_like(
        "Olmo3ForCausalLM", _olmo3_settings, lambda cfg: windows_config(cfg) | rotary_fields_by_kind(cfg.rotary), _OLMO
    ),
    "granite": llama_like("GraniteForCausalLM", _granite_settings, _granite_config),
}
