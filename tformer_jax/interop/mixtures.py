"""Hugging Face's decoder-only language models with experts: Mixtral, Qwen 2 MoE and Qwen 3 MoE."""

from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import check, require
from tformer_jax.interop.decoders import (
    ATTENTION,
    GATED,
    PRE_NORMS,
    Settings,
    check_windows,
    llama_config,
    llama_like,
    llama_rules,
    llama_settings,
    mistral_config,
    mixtral_settings,
)
from tformer_jax.interop.mapping import kernel

_MIXTRAL = (
    ("ffn/router", "block_sparse_moe.gate.weight", kernel()),
    ("ffn/gate_kernel", "block_sparse_moe.experts.{e}.w1.weight", kernel()),
    ("ffn/contract_kernel", "block_sparse_moe.experts.{e}.w2.weight", kernel()),
    ("ffn/expand_kernel", "block_sparse_moe.experts.{e}.w3.weight", kernel()),
)
_NAMES = (("gate", "gate"), ("expand", "up"), ("contract", "down"))
_QWEN = (
    ("ffn/router", "mlp.gate.weight", kernel()),
    *((f"ffn/{ours}_kernel", f"mlp.experts.{{e}}.{theirs}_proj.weight", kernel()) for ours, theirs in _NAMES),
    *((f"ffn/shared/{ours}/kernel", f"mlp.shared_expert.{theirs}_proj.weight", kernel()) for ours, theirs in _NAMES),
    ("ffn/shared_gate", "mlp.shared_expert_gate.weight", kernel()),
)


def _mixtral_settings(hf: Settings) -> Settings:
    layers, k = hf["num_hidden_layers"], hf["num_experts_per_tok"]
    moe = {
        "num_experts": hf["num_local_experts"],
        "experts_per_token": k,
        # theirs pools the tokens of all layers, ours balances each layer; equal if all experts are used equally
        "balance_loss": hf["router_aux_loss_coef"] * k / max(layers, 1),
    }
    return mixtral_settings(hf) | {"ffn": "moe", "moe": moe}


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


def _qwen_settings(hf: Settings) -> Settings:
    require(hf, use_sliding_window=False)
    check_windows(hf, False, "use_sliding_window is false")
    moe = {
        "num_experts": hf["num_experts"],
        "experts_per_token": hf["num_experts_per_tok"],
        "router_normalize": hf["norm_topk_prob"],
        **_expert_layers(hf),
    }
    return llama_settings(hf) | {"ffn": "moe", "ffn_dim": hf["moe_intermediate_size"], "ffn_bias": False, "moe": moe}


def _qwen2_settings(hf: Settings) -> Settings:
    settings = _qwen_settings(hf)
    settings["moe"] |= {"shared_dim": hf["shared_expert_intermediate_size"], "shared_gate": True}
    return settings | {"attention_bias": ("query", "key", "value") if hf["qkv_bias"] else ()}


def _qwen3_settings(hf: Settings) -> Settings:
    return _qwen_settings(hf) | {"qk_norm": True}


def _mixtral_config(cfg: ModelConfig) -> Settings:
    return mistral_config(cfg) | {
        "num_local_experts": cfg.moe.num_experts,
        "num_experts_per_tok": cfg.moe.experts_per_token,
        "router_aux_loss_coef": cfg.moe.balance_loss * cfg.decoder_layers / cfg.moe.experts_per_token,
    }


def _qwen_config(cfg: ModelConfig) -> Settings:
    experts = [cfg.has_experts(layer) for layer in range(cfg.decoder_layers)]
    return llama_config(cfg) | {
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
    return _qwen_config(cfg) | shared | {"qkv_bias": "query" in cfg.attention_bias}


_MIXTRAL_RULES = llama_rules(*ATTENTION, *_MIXTRAL, *PRE_NORMS)
_QWEN_RULES = llama_rules(*ATTENTION, *GATED, *_QWEN, *PRE_NORMS)

MIXTURES = {
    "mixtral": llama_like("MixtralForCausalLM", _mixtral_settings, _mixtral_config, _MIXTRAL_RULES),
    "qwen2_moe": llama_like("Qwen2MoeForCausalLM", _qwen2_settings, _qwen2_config, _QWEN_RULES),
    "qwen3_moe": llama_like("Qwen3MoeForCausalLM", _qwen3_settings, _qwen_config, _QWEN_RULES),
}
