"""DeepSeek-V2 and V3: latent attention, and experts in groups beside shared ones."""

import math
from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.interop import llama
from tformer_jax.interop.architecture import Settings, check, require
from tformer_jax.interop.mapping import AFFINE, NORM, SAME, Fusions, Rule, fused_rows, kernel, parts
from tformer_jax.interop.mixtures import expert_parts
from tformer_jax.interop.rotary import rope_fields, rotary_fields

LATENT_EPS = 1e-6
"""`norm_eps` of the latents, whatever config.json says."""
_FIELDS = {
    "num_experts_per_tok": "experts_per_token",
    "n_routed_experts": "num_experts",
    "n_group": "groups",
    "topk_group": "groups_per_token",
    "routed_scaling_factor": "router_factor",
    "norm_topk_prob": "router_normalize",
    "first_k_dense_replace": "dense_layers",
}
_LATENTS = {
    "kv_lora_rank": "latent_dim",
    "q_lora_rank": "query_latent_dim",
    "qk_rope_head_dim": "rotary_dim",
    "v_head_dim": "value_dim",
}
_BIAS = "mlp.gate.e_score_correction_bias"


def _settings(hf: Settings, *, rotates_pairs: bool) -> Settings:
    require(hf, rms_norm_eps=LATENT_EPS, attention_bias=False, num_key_value_heads=hf["num_attention_heads"])
    require(hf, moe_layer_freq=1, mlp_bias=False)
    size, rope, dense = hf["qk_nope_head_dim"], rope_fields(hf), hf["first_k_dense_replace"]
    require(hf, qk_head_dim=size + hf["qk_rope_head_dim"], head_dim=hf["qk_rope_head_dim"])
    check(hf["n_shared_experts"] > 0, "n_shared_experts must be at least 1")
    check(dense < hf["num_hidden_layers"], f"first_k_dense_replace={dense} leaves no layer with experts")
    moe = {ours: hf[theirs] for theirs, ours in _FIELDS.items()}
    moe |= {name: 1 for name in ("groups", "groups_per_token") if moe[name] is None}
    moe["shared_dim"] = hf["n_shared_experts"] * hf["moe_intermediate_size"]
    moe["router_factor"] = float(moe["router_factor"])
    base = llama.settings(hf)
    base["rotary"] |= {"pairing": "interleaved"} if rotates_pairs else {}
    del base["attention_bias"], base["num_kv_heads"]
    settings = base | {
        "head_dim": size,
        "attention": "mla",
        "mla": {ours: hf[theirs] for theirs, ours in _LATENTS.items()},
        "ffn": "moe",
        "ffn_dim": hf["moe_intermediate_size"],
        "ffn_bias": False,
        "moe": moe | ({"dense_dim": hf["intermediate_size"]} if dense else {}),
    }
    if rope.get("mscale_all_dim") and settings["rotary"].get("scaling"):
        magnitude = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        settings["attention_scale"] = magnitude**2 / math.sqrt(size + hf["qk_rope_head_dim"])
    return settings


def _v2_settings(hf: Settings) -> Settings:
    """Returns our settings; `topk_method` says whether groups matter, and weights are never normalized."""
    require(hf, scoring_func="softmax", norm_topk_prob=False)
    method, settings = hf["topk_method"], _settings(hf, rotates_pairs=True)
    check(method in ("greedy", "group_limited_greedy"), f"topk_method={method!r} is not supported")
    groups = {"groups": 1, "groups_per_token": 1} if method == "greedy" else {}
    settings["moe"] |= groups | {"balance_loss": float(hf["aux_loss_alpha"])}
    return settings


def _v3_settings(hf: Settings) -> Settings:
    require(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    settings = _settings(hf, rotates_pairs=hf["rope_interleave"])
    settings["moe"] |= {"router_scores": "sigmoid", "router_bias": "choice", "group_top": 2, "balance_loss": 0.0}
    return settings


def _config(cfg: ModelConfig) -> Settings:
    fields, default = rotary_fields(cfg.rotary), cfg.score_size**-0.5
    if cfg.rotary.scaling == "yarn" and cfg.attention_scale is not None:
        magnitude = math.sqrt(cfg.attention_scale / default)
        for name in ("rope_parameters", "rope_scaling"):
            fields[name]["mscale_all_dim"] = (magnitude - 1) / (0.1 * math.log(cfg.rotary.factor))
    return llama.config(cfg) | {
        **fields,
        **{theirs: getattr(cfg.moe, ours) for theirs, ours in _FIELDS.items()},
        **{theirs: getattr(cfg.mla, ours) for theirs, ours in _LATENTS.items()},
        "v_head_dim": cfg.value_size,
        "qk_nope_head_dim": cfg.head_size,
        "head_dim": cfg.mla.rotary_dim,
        "attention_bias": False,
        "intermediate_size": cfg.moe.dense_dim or cfg.ffn_dim,
        "moe_intermediate_size": cfg.ffn_dim,
        "n_shared_experts": (cfg.moe.shared_dim or 0) // cfg.ffn_dim,
    }


def _v2_config(cfg: ModelConfig) -> Settings:
    method = "greedy" if cfg.moe.groups == 1 else "group_limited_greedy"
    return _config(cfg) | {"topk_method": method, "aux_loss_alpha": cfg.moe.balance_loss}


def _v3_config(cfg: ModelConfig) -> Settings:
    return _config(cfg) | {"rope_interleave": cfg.rotary.pairing == "interleaved"}


def _fused(cfg: ModelConfig) -> Fusions:
    """Returns the fusions of the latent and the rotated key, and of the keys and values of each head."""
    latents = "self_attn.kv_a_proj_with_mqa", "self_attn.latent", "self_attn.rotated"
    heads = "self_attn.kv_b_proj", "self_attn.key", "self_attn.value"
    return {
        **fused_rows(*latents, sizes=(cfg.mla.latent_dim, cfg.mla.rotary_dim)),
        **fused_rows(*heads, sizes=(cfg.head_size, cfg.value_size), groups=cfg.num_heads),
    }


def _rules(cfg: ModelConfig) -> tuple[Rule, ...]:
    query = "q_b_proj" if cfg.mla.query_latent_dim else "q_proj"
    same = {name: name for name in ("latent", "rotated", "key", "value")}
    names = {"query": query, "query_latent": "q_a_proj", **same}
    attention = (
        *(part for ours, theirs in names.items() for part in parts(ours, theirs, AFFINE)),
        *parts("latent_norm", "kv_a_layernorm", NORM),
        *parts("query_latent_norm", "q_a_layernorm", NORM),
        ("output/kernel", "o_proj.weight", kernel(2)),
    )
    return llama.rules(
        *((f"self_attention/{ours}", f"self_attn.{theirs}", layout) for ours, theirs, layout in attention),
        *llama.GATED,
        *expert_parts("shared_experts"),
        ("ffn/router_bias", _BIAS, SAME),
        *llama.PRE_NORMS,
    )


_NAMES: dict[str, Any] = {
    "fused": _fused,
    "attentions": ("mla",),
    "float32": (rf".*\.{_BIAS}",),
    "ignored": (*llama.BUFFERS, r"model\.layers\.61\..*"),
}
"""Layer 61 of DeepSeek-V3 predicts further tokens, in training."""

DEEPSEEK = {
    "deepseek_v2": llama.architecture("DeepseekV2ForCausalLM", _v2_settings, _v2_config, _rules, **_NAMES),
    "deepseek_v3": llama.architecture("DeepseekV3ForCausalLM", _v3_settings, _v3_config, _rules, **_NAMES),
}
