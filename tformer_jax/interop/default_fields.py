"""Defaults of fields that published configs omit."""

from typing import Any

_LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
_UNTIED = {"tie_word_embeddings": False}
_MISTRAL = _LLAMA | _UNTIED | {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
_QWEN = _LLAMA | {
    **_UNTIED,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE = {"decoder_sparse_step": 1, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}
_GATED_DELTA = _LLAMA | {
    **_UNTIED,
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEEPSEEK = _LLAMA | {
    **_UNTIED,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_OLMO = _LLAMA | _UNTIED | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_GEMMA = _LLAMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = _GEMMA | {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_BART = {
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "init_std": 0.02,
}
_T5 = {
    "n_positions": 512,
    "d_kv": 64,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "tie_word_embeddings": True,
    "dropout_rate": 0.1,
}
_BERT = {
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
    },
    "llama": _LLAMA | _UNTIED | {"max_position_embeddings": 2048},
    "mistral": _MISTRAL | {"sliding_window": 4096},
    "mixtral": _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_5_text": _GATED_DELTA | {"num_key_value_heads": 4},
    "qwen3_next": _GATED_DELTA
    | _QWEN_MOE
    | {
        "num_key_value_heads": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "gpt_oss": _LLAMA
    | _UNTIED
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "swiglu_limit": 7.0,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen2_moe": _QWEN
    | _QWEN_MOE
    | {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "qwen3_moe": _QWEN
    | _QWEN_MOE
    | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    "deepseek_v2": _DEEPSEEK
    | {
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "moe_intermediate_size": 1407,
        "aux_loss_alpha": 0.001,
    },
    "deepseek_v3": _DEEPSEEK
    | {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 2048,
        "rope_interleave": True,
    },
    "smollm3": _LLAMA
    | {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
    },
    "stablelm": _LLAMA
    | _UNTIED
    | {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "partial_rotary_factor": 0.25,
    },
    "gemma": _LLAMA
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "ministral": _MISTRAL | {"sliding_window": 4096},
    "cwm": _MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "head_dim": 128, "sliding_window": 8192},
    "arcee": _OLMO | {"hidden_act": "relu2", "max_position_embeddings": 4096},
    "seed_oss": _LLAMA
    | _UNTIED
    | {
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "phi3": _OLMO | {"max_position_embeddings": 4096, "resid_pdrop": 0.0},
    "hunyuan_v1_dense": _OLMO,
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"rope_theta": 500_000.0, "sliding_window": 4096},
    "granite": _LLAMA
    | _UNTIED
    | {
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_multiplier": 1.0,
    },
    "gemma2": _GEMMA2,
    "t5gemma": _GEMMA2 | {"is_decoder": True, "dropout_rate": 0.0, "tie_word_embeddings": True},
    "gemma3_text": _GEMMA
    | {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm-roberta"), _BERT | {"pad_token_id": 1}),
    "albert": _BERT
    | {
        "hidden_act": "gelu_new",
        "embedding_size": 128,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    },
    "distilbert": {
        "vocab_size": 30_522,
        "max_position_embeddings": 512,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
    },
    "modernbert": {
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "classifier_pooling": "cls",
        "norm_eps": 1e-5,
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
        **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), 0.0),
        "initializer_range": 0.02,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "rope_theta": 160_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "t5": _T5,
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "umt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "bart": _BART,
    "mbart": _BART,
    "marian": _BART,
    "m2m_100": _BART
    | {"activation_function": "relu", "scale_embedding": True, "attention_dropout": 0.1, "pad_token_id": 1},
}
"""Defaults by `model_type`, of the settings that this package reads."""
