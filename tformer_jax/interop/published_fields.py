"""Published configs: the defaults of fields that they omit, and fields that do not change what a model computes."""

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
    "qwen3_next": _LLAMA
    | _UNTIED
    | _QWEN_MOE
    | {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
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
    "gemma2": _GEMMA
    | {
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
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

_FILES = (
    *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "auto_map", "prefix"),
    *(
        "id2label",
        "label2id",
        "num_labels",
        "_num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "output_past",
    ),
    *("tokenizer_class", "is_encoder_decoder", "tie_word_embeddings", "gradient_checkpointing", "cache_implementation"),
    *("is_llama_config", "unsloth_fixed", "unsloth_version", "transformers.js_config", "max_sequence_length"),
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
)
_TOKENS = tuple(f"{name}_token_id" for name in ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start"))
_GENERATION = (
    *("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "num_beams", "num_beam_groups", "max_length"),
    *("min_length", "length_penalty", "early_stopping", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("repetition_penalty", "diversity_penalty", "do_sample", "temperature", "top_k", "top_p", "typical_p"),
    *("num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
    *("force_bos_token_to_be_generated", "suppress_tokens", "begin_suppress_tokens"),
)
_TRAINING = (
    *("embd_pdrop", "classifier_dropout", "classif_dropout", "encoder_layerdrop", "decoder_layerdrop", "layerdrop"),
    *("initializer_factor", "output_router_logits", "router_jitter_noise", "pretraining_tp", "initializer_range"),
    *("router_aux_loss_coef", "attention_dropout", "hidden_dropout", "neftune_noise_alpha"),
)
_HEADS = (
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "classifier_activation"),
)
UNREAD = frozenset((*_FILES, *_TOKENS, *_GENERATION, *_TRAINING, *_HEADS))
"""Fields that change the logits of no model: they are about files, tokens, generation, training and other heads."""

_WINDOWS_OFF = ("sliding_window", "max_window_layers")
_LENGTHS = ("n_positions", "max_position_embeddings")
_HUNYUAN = (
    *("add_classification_head", "class_num", "cla_share_factor", "dense_list", "norm_type", "pool_type", "mlp_bias"),
    *("eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"),
    *(
        "image_token_id",
        "video_start_id",
        "video_end_id",
        "mask_init_id",
        "org_vocab_size",
        "position_embedding_xdrope",
    ),
)
_MARIAN = ("static_position_embeddings", "extra_pos_embeddings", "normalize_embedding")
_MODERNBERT = (
    *("global_attn_every_n_layers", "position_embedding_type", "layer_norm_eps", "classifier_pooling"),
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "initializer_cutoff_factor"),
    *("sparse_prediction", "sparse_pred_ignore_index", "decoder_bias"),
)
UNREAD_BY: dict[str, tuple[str, ...]] = {
    "gpt2": ("n_ctx", "reorder_and_upcast_attn"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"), _WINDOWS_OFF),
    **dict.fromkeys(("gemma2", "gemma3_text"), ("_sliding_window_pattern", "sliding_window_pattern")),
    "gemma": ("hidden_activation",),
    "gpt_oss": ("hidden_act", "initial_context_length"),
    "deepseek_v2": ("ep_size", "seq_aux"),
    "deepseek_v3": ("ep_size", "seq_aux", "aux_loss_alpha", "num_nextn_predict_layers"),
    "phi3": ("original_max_position_embeddings",),
    "hunyuan_v1_dense": _HUNYUAN,
    **dict.fromkeys(("t5", "mt5"), _LENGTHS),
    "umt5": (*_LENGTHS, "scalable_attention"),
    "bart": ("decoder_vocab_size",),
    **dict.fromkeys(("marian", "m2m_100"), _MARIAN),
    "distilbert": ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
    "modernbert": _MODERNBERT,
}
"""Fields that transformers does not read for a `model_type`, or not with the fields that this package requires."""

_BART_ALIASES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}
_T5_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
_DEEPSEEK_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK_ALIASES),
    "qwen3_moe": {"num_local_experts": "num_experts"},
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5_ALIASES),
    **dict.fromkeys(("bart", "mbart", "marian", "m2m_100"), _BART_ALIASES),
    "distilbert": {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    "modernbert": {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
}
"""Other names of fields by `model_type`, as `attribute_map` of transformers has them."""

_PARALLEL = "attention and FFN in parallel"
UNSUPPORTED = {
    "olmo": ("norms without parameters", "olmo2"),
    "olmoe": ("experts behind QK-norms over all heads", "olmo2"),
    "granitemoe": ("experts with the multipliers of Granite", "granite"),
    "lfm2": ("gated short convolutions", "qwen3"),
    "phi": (_PARALLEL, "phi3"),
    "gpt_neox": (_PARALLEL, "stablelm"),
    "falcon": (_PARALLEL, "llama"),
    "cohere": (_PARALLEL, "llama"),
}
"""What each of these `model_type` has that no supported one has, and the nearest supported one."""
