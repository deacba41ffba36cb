"""Hugging Face's decoder-only language models with experts: Mixtral, Qwen 2 MoE, Qwen 3 MoE and gpt-oss."""

import numpy as np

from tformer_jax.config import ModelConfig
from tformer_jax.interop import llama
from tformer_jax.interop.architecture import Settings, check, read_layer_types, require
from tformer_jax.interop.mapping import SAME, Fusion, Part, kernel

_MIXTRAL = (
    ("ffn/router", "block_sparse_moe.gate.weight", kernel()),
    ("ffn/gate_kernel", "block_sparse_moe.experts.{e}.w1.weight", kernel()),
    ("ffn/contract_kernel", "block_sparse_moe.experts.{e}.w2.weight", kernel()),
    ("ffn/expand_kernel", "block_sparse_moe.experts.{e}.w3.weight", kernel()),
)
_NAMES = (("gate", "gate"), ("expand", "up"), ("contract", "down"))


def expert_parts(shared: str) -> tuple[Part, ...]:
    """Returns the parts of a router, of experts and of the shared one, which has the name `shared`."""
    return (
        ("ffn/router", "mlp.gate.weight", kernel()),
        *((f"ffn/{ours}_kernel", f"mlp.experts.{{e}}.{theirs}_proj.weight", kernel()) for ours, theirs in _NAMES),
        *((f"ffn/shared/{ours}/kernel", f"mlp.{shared}.{theirs}_proj.weight", kernel()) for ours, theirs in _NAMES),
        ("ffn/shared_gate", f"mlp.{shared}_gate.weight", kernel()),
    )


def _mixtral_experts(hf: Settings) -> Settings:
    layers, k = hf["num_hidden_layers"], hf["num_experts_per_tok"]
    return {
        "num_experts": hf["num_local_experts"],
        "experts_per_token": k,
        # theirs pools the tokens of all layers, ours balances each layer; equal if all experts are used equally
        "balance_loss": hf["router_aux_loss_coef"] * k / max(layers, 1),
    }


def _mixtral_settings(hf: Settings) -> Settings:
    """Returns our settings; there are no biases, and windows in all layers or none."""
    llama.check_windows(hf, hf.get("sliding_window") is not None, "sliding_window is null")
    windows = llama.same_window_settings(hf)
    return llama.settings_without_biases(hf) | windows | {"ffn": "moe", "moe": _mixtral_experts(hf)}


def _expert_layers(hf: Settings) -> Settings:
    """Returns our settings of the layers with experts: every n-th one that is not in `mlp_only_layers`."""
    every, depth, dense = hf["decoder_sparse_step"], hf["num_hidden_layers"], hf.get("mlp_only_layers") or []
    layers = [i for i in range(depth) if (i + 1) % every == 0 and i not in dense]
    check(bool(layers), "no layer has experts")
    leading = layers[0] if layers[0] >= every else 0
    alike = layers == [i for i in range(leading, depth) if (i + 1) % every == 0]
    check(alike, f"mlp_only_layers={dense!r} is not supported, only the first layers are")
    width = {} if len(layers) == depth else {"dense_dim": hf["intermediate_size"]}
    coefficient = hf["router_aux_loss_coef"] * hf["num_experts_per_tok"] / len(layers)
    return {"every": every, "dense_layers": leading, "balance_loss": coefficient, **width}


def _qwen_settings(hf: Settings, *, shared: bool = False) -> Settings:
    require(hf, use_sliding_window=False)
    llama.check_windows(hf, False, "use_sliding_window is false")
    return llama.settings(hf) | qwen_experts(hf, shared=shared)


def qwen_experts(hf: Settings, *, shared: bool) -> Settings:
    """Returns our settings of the experts of Qwen, and of the gated one that all tokens share."""
    moe = {
        "num_experts": hf["num_experts"],
        "experts_per_token": hf["num_experts_per_tok"],
        "router_normalize": hf["norm_topk_prob"],
        **_expert_layers(hf),
    }
    moe |= {"shared_dim": hf["shared_expert_intermediate_size"], "shared_gate": True} if shared else {}
    return {"ffn": "moe", "ffn_dim": hf["moe_intermediate_size"], "ffn_bias": False, "moe": moe}


def _qwen2_settings(hf: Settings) -> Settings:
    return _qwen_settings(hf, shared=True) | {"attention_bias": ("query", "key", "value") if hf["qkv_bias"] else ()}


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss_settings(hf: Settings) -> Settings:
    """Returns our settings; layers have full attention by `layer_types`, or else every second one."""
    require(hf, swiglu_alpha=1.702)
    require(hf.get("quantization_config") or {}, quant_method="mxfp4")
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf["rope_parameters"] = GPT_OSS_ROPE
    moe = _mixtral_experts(hf) | {"router_bias": "logits", "gate_limit": float(hf["swiglu_limit"])}
    return llama.settings(hf) | {
        **llama.window_settings(hf, read_layer_types(hf, "sliding", "full")),
        "attention_sinks": True,
        "activation": "gelu_sigmoid",
        "ffn": "moe",
        "ffn_bias": True,
        "moe": moe,
    }


def _gpt_oss_config(cfg: ModelConfig) -> Settings:
    return llama.windows_config(cfg) | _experts_config(cfg) | {"hidden_act": "silu", "swiglu_limit": cfg.moe.gate_limit}


def _experts_config(cfg: ModelConfig) -> Settings:
    return {
        "num_local_experts": cfg.moe.num_experts,
        "num_experts_per_tok": cfg.moe.experts_per_token,
        "router_aux_loss_coef": cfg.moe.balance_loss * cfg.decoder_layers / cfg.moe.experts_per_token,
    }


def qwen_moe_config(cfg: ModelConfig) -> Settings:
    """Returns their settings of Qwen 3 MoE."""
    experts = [cfg.has_experts(layer) for layer in range(cfg.decoder_layers)]
    return llama.config(cfg) | {
        "intermediate_size": cfg.moe.dense_dim or cfg.ffn_dim,
        "moe_intermediate_size": cfg.ffn_dim,
        "num_experts": cfg.moe.num_experts,
        "num_experts_per_tok": cfg.moe.experts_per_token,
        "norm_topk_prob": cfg.moe.router_normalize,
        "decoder_sparse_step": cfg.moe.every,
        "mlp_only_layers": list(range(min(cfg.moe.dense_layers, cfg.decoder_layers))),
        "router_aux_loss_coef": cfg.moe.balance_loss * sum(experts) / cfg.moe.experts_per_token,
    }


def _qwen2_config(cfg: ModelConfig) -> Settings:
    shared = {"shared_expert_intermediate_size": cfg.moe.shared_dim}
    return qwen_moe_config(cfg) | shared | {"qkv_bias": "query" in cfg.attention_bias}


_GPT_OSS = (
    ("self_attention/sinks", "self_attn.sinks", SAME),
    ("ffn/router", "mlp.router.weight", kernel()),
    ("ffn/router_bias", "mlp.router.bias", SAME),
    *((f"ffn/{ours}_kernel", f"mlp.experts.{theirs}_proj", SAME) for ours, theirs in _NAMES),
    *((f"ffn/{ours}_bias", f"mlp.experts.{theirs}_proj_bias", SAME) for ours, theirs in _NAMES),
)
_GPT_OSS_FUSED = {
    f"mlp.experts.gate_up_proj{end}": Fusion(
        (f"mlp.experts.gate_proj{end}", f"mlp.experts.up_proj{end}"),
        lambda array: (array[..., ::2], array[..., 1::2]),
        lambda parts: np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1),
    )
    for end in ("", "_bias")
}
_QWEN_RULES = llama.rules(*llama.ATTENTION, *llama.GATED, *expert_parts("shared_expert"), *llama.PRE_NORMS)

MIXTURES = {
    "mixtral": llama.architecture(
        "MixtralForCausalLM",
        _mixtral_settings,
        lambda cfg: llama.mistral_config(cfg) | _experts_config(cfg),
        llama.rules(*llama.ATTENTION, *_MIXTRAL, *llama.PRE_NORMS),
    ),
    "gpt_oss": llama.architecture(
        "GptOssForCausalLM",
        _gpt_oss_settings,
        _gpt_oss_config,
        llama.rules(*llama.ATTENTION, *_GPT_OSS, *llama.PRE_NORMS),
        fused=lambda cfg: _GPT_OSS_FUSED,
    ),
    "qwen2_moe": llama.architecture("Qwen2MoeForCausalLM", _qwen2_settings, _qwen2_config, _QWEN_RULES),
    "qwen3_moe": llama.architecture(
        "Qwen3MoeForCausalLM", lambda hf: _qwen_settings(hf) | {"qk_norm": True}, qwen_moe_config, _QWEN_RULES
    ),
}
