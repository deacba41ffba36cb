"""Fields of published configs that do not change what a model computes, other names, and unsupported types."""

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
    "t5gemma": ("classifier_dropout_rate",),
    "qwen3_5_text": ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
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
    "albert": ("classifier_dropout_prob", "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
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
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("gated short convolutions", "qwen3")),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), ("experts below a dense model's projections", "qwen3_next")),
    "t5gemma2": ("self- and cross-attention with one softmax", "t5gemma"),
    **dict.fromkeys(("gemma4", "gemma4_text"), ("embeddings in each layer, and heads of two sizes", "gemma3_text")),
    "deepseek_v32": ("attention to the tokens that an indexer selects", "deepseek_v3"),
    "olmo_hybrid": ("the gated delta rule with norms of outputs", "olmo3"),
    "phi": (_PARALLEL, "phi3"),
    "gpt_neox": (_PARALLEL, "stablelm"),
    "falcon": (_PARALLEL, "llama"),
    "cohere": (_PARALLEL, "llama"),
}
"""What each of these `model_type` has that no supported one has, and the nearest supported one."""
