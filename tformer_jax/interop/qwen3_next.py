"""Qwen3-Next and Qwen3.5: the gated delta rule and gated attention; Qwen3-Next has experts beside a shared one."""

from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.interop import llama
from tformer_jax.interop.architecture import Settings, layer_types, our_layer_pattern, read_layer_types, require
from tformer_jax.interop.files import IMAGES
from tformer_jax.interop.mapping import AFFINE, SAME, Fusions, Layout, Part, Rule, fused_rows, kernel, parts
from tformer_jax.interop.mixtures import expert_parts, qwen_experts, qwen_moe_config
from tformer_jax.interop.rotary import rotary_fields
from tformer_jax.nn.gated_delta import Sizes

_FIELDS = {
    "linear_num_value_heads": "num_heads",
    "linear_num_key_heads": "num_key_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
}


def _dense_settings(hf: Settings) -> Settings:
    """Returns our settings; layers have full attention by `layer_types`, or else every n-th one.

    `mrope_section` divides the rotation among the axes of images, which have one position in a text.
    """
    require(hf, hidden_act="silu", attn_output_gate=True)
    if rope := hf.get("rope_parameters"):
        hf["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    kinds = read_layer_types(hf, *["linear"] * (hf["full_attention_interval"] - 1), "full")
    delta = {ours: hf[theirs] for theirs, ours in _FIELDS.items()}
    return llama.settings(hf, partial=True) | {
        "ffn_bias": False,
        "layer_pattern": our_layer_pattern(kinds, "linear", "full"),
        "gated_delta": delta | {"conv_kernel_size": hf["linear_conv_kernel_dim"]},
        "qk_norm": True,
        "attention_gate": True,
        "norm_unit_offset": True,
    }


def _next_settings(hf: Settings) -> Settings:
    return _dense_settings(hf) | qwen_experts(hf, shared=True)


def _dense_config(cfg: ModelConfig) -> Settings:
    sizes = Sizes.resolve(cfg)
    return llama.config(cfg) | {
        **{theirs: getattr(sizes, ours) for theirs, ours in _FIELDS.items()},
        "linear_conv_kernel_dim": cfg.gated_delta.conv_kernel_size,
        "layer_types": layer_types(cfg, cfg.decoder_layers),
        **rotary_fields(cfg.rotary, partial=True),
    }


def _next_config(cfg: ModelConfig) -> Settings:
    shared = {"shared_expert_intermediate_size": cfg.moe.shared_dim}
    return qwen_moe_config(cfg) | _dense_config(cfg) | {"intermediate_size": cfg.moe.dense_dim or cfg.ffn_dim} | shared


_CONVOLUTION = Layout(
    lambda array, shape: array[:, 0].T.reshape(shape), lambda array: array.reshape(len(array), -1).T[:, None]
)
"""Theirs is [features, 1, taps], ours [taps, heads, size]."""
_OUTPUT = "self_attention/output/kernel"
_CONVOLVED = ("queries", "keys", "values")
_DELTA: tuple[Part, ...] = (
    *((f"{name}/project/kernel", f"{name}.weight", kernel()) for name in _CONVOLVED),
    *((f"{name}/conv_kernel", f"conv_{name}.weight", _CONVOLUTION) for name in _CONVOLVED),
    *((f"{name}/kernel", f"{name}.weight", kernel()) for name in ("gate", "beta", "decay")),
    ("A_log", "A_log", SAME),
    ("dt_bias", "dt_bias", SAME),
    ("scale", "norm.weight", SAME),
)


def _rules(cfg: ModelConfig) -> tuple[Rule, ...]:
    """Returns the rules; output projections of both kinds of layers have one name of ours, but two names of theirs."""
    outputs = (
        Rule(f"decoder/layers_{i}/{_OUTPUT}", f"model.layers.{i}.linear_attn.out_proj.weight", kernel(2))
        for i, kind in enumerate(cfg.layer_kinds(cfg.decoder_layers))
        if kind == "gated_delta"
    )
    delta = ((f"self_attention/{ours}", f"linear_attn.{theirs}", layout) for ours, theirs, layout in _DELTA)
    gate = parts("self_attention/head_gate", "self_attn.gate_proj", AFFINE)
    return (
        *outputs,
        *llama.rules(*delta, *gate, *llama.ATTENTION, *llama.GATED, *expert_parts("shared_expert"), *llama.PRE_NORMS),
    )


def _fused(cfg: ModelConfig) -> Fusions:
    """Returns the fusions of both: of queries and their gates, and of convolutions."""
    N, K, H, P = Sizes.resolve(cfg)
    convolved = [f"linear_attn.conv_{name}" for name in _CONVOLVED]
    return {
        **fused_rows("self_attn.q_proj", "self_attn.q_proj", "self_attn.gate_proj", groups=cfg.num_heads),
        **fused_rows("linear_attn.conv1d", *convolved, sizes=(K * H, K * H, N * P)),
    }


def _next_fused(cfg: ModelConfig) -> Fusions:
    N, K, H, P = Sizes.resolve(cfg)
    names = [f"linear_attn.{name}" for name in (*_CONVOLVED, "gate")]
    return {
        **_fused(cfg),
        **fused_rows("linear_attn.in_proj_qkvz", *names, sizes=(H, H, N // K * P, N // K * P), groups=K),
        **fused_rows("linear_attn.in_proj_ba", "linear_attn.beta", "linear_attn.decay", groups=K),
    }


def _dense_fused(cfg: ModelConfig) -> Fusions:
    N, K, H, P = Sizes.resolve(cfg)
    names = [f"linear_attn.{name}" for name in _CONVOLVED]
    return {
        **_fused(cfg),
        **fused_rows("linear_attn.in_proj_qkv", *names, sizes=(K * H, K * H, N * P)),
        **fused_rows("linear_attn.in_proj_z", "linear_attn.gate"),
        **fused_rows("linear_attn.in_proj_b", "linear_attn.beta"),
        **fused_rows("linear_attn.in_proj_a", "linear_attn.decay"),
    }


_OPTIONS: dict[str, Any] = {
    "attentions": ("multi_head", "gated_delta"),
    "ignored": (*llama.BUFFERS, IMAGES, r"mtp\..*"),
}
"""Arrays of `mtp` predict further tokens, in training."""

QWEN3_NEXT = {
    "qwen3_next": llama.architecture(
        "Qwen3NextForCausalLM", _next_settings, _next_config, _rules, fused=_next_fused, **_OPTIONS
    ),
    "qwen3_5_text": llama.architecture(
        *("Qwen3_5ForCausalLM", _dense_settings, _dense_config, _rules),
        fused=_dense_fused,
        float32=(r".*linear_attn\.(A_log|norm\.weight)",),
        **_OPTIONS,
    ),
}
