"""Defaults of transformers' configs, for settings that a published config.json omits."""

from typing import Any

_LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
_MISTRAL = _LLAMA | {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
_QWEN = _LLAMA | {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = _LLAMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
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
    "llama": _LLAMA | {"max_position_embeddings": 2048},
    "mistral": _MISTRAL | {"sliding_window": 4096},
    "mixtral": _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma2": _GEMMA
    | {
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA
    | {
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "bert": {
        "max_position_embeddings": 512,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "initializer_range": 0.02,
    },
    "t5": {
        "n_positions": 512,
        "d_kv": 64,
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "tie_word_embeddings": True,
        "dropout_rate": 0.1,
    },
    "bart": _BART,
    "marian": _BART,
}
"""Defaults by `model_type`, of the settings that this package reads."""
