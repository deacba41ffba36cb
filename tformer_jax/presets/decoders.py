"""Decoder-only language models: GPT-2, Llama, Mistral, Mixtral, Qwen and Gemma."""

from tformer_jax.presets.types import Settings


def gpt2(dim: int, layers: int, heads: int) -> Settings:
    """Returns the settings of GPT-2 ("Language Models are Unsupervised Multitask Learners", 2019, table 2)."""
    return {
        "family": "decoder_lm",
        "vocab_size": 50_257,
        "max_length": 1024,
        "dim": dim,
        "decoder_layers": layers,
        "num_heads": heads,
        "ffn_dim": 4 * dim,
        "attention_projections": "fused_qkv",
        "activation": "gelu_tanh",
        "position": "learned",
        "scale_embeddings": False,
        "attention_dropout": 0.1,
        "initializer": "normal",
        "scale_residual_init": True,
    }


def llama(
    vocab_size: int, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, length: int, base: float = 10_000.0
) -> Settings:
    """Returns the settings of Llama 2 and the like ("Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023)."""
    return {
        "family": "decoder_lm",
        "vocab_size": vocab_size,
        "max_length": length,
        "dim": dim,
        "decoder_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn": "gated",
        "ffn_dim": ffn_dim,
        "ffn_bias": False,
        "activation": "silu",
        "attention_bias": (),
        "norm": "rmsnorm",
        "position": "rotary",
        "rotary": {"base": base},
        "tie_embeddings": "none",
        "scale_embeddings": False,
        "dropout": 0.0,
        "initializer": "normal",
    }


_LLAMA3_1 = {"rotary": {"base": 500_000.0, "scaling": "llama3", "factor": 8.0}}
_LLAMA3_2 = {"rotary": {"base": 500_000.0, "scaling": "llama3", "factor": 32.0}, "tie_embeddings": "output"}


def llama3(dim: int, layers: int, heads: int, ffn_dim: int, length: int = 8192) -> Settings:
    """Returns the settings of Llama 3 ("The Llama 3 Herd of Models", 2024, table 3)."""
    return llama(128_256, dim, layers, heads, 8, ffn_dim, length, 500_000.0)


def mistral() -> Settings:
    """Returns the settings of Mistral 7B ("Mistral 7B", 2023, table 1)."""
    return llama(32_000, 4096, 32, 32, 8, 14_336, 32_768) | {"window": 4096, "layer_pattern": ("window",)}


def qwen2_5(vocab_size: int, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> Settings:
    """Returns the settings of Qwen2.5, which has biases of queries, keys and values (its report, 2024, table 1)."""
    return llama(vocab_size, dim, layers, heads, kv_heads, ffn_dim, 32_768, 1_000_000.0) | {
        "attention_bias": ("query", "key", "value"),
        "norm_eps": 1e-6,
    }


def qwen3(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> Settings:
    """Returns the settings of Qwen3 ("Qwen3 Technical Report", 2025, table 1)."""
    return llama(151_936, dim, layers, heads, kv_heads, ffn_dim, 40_960, 1_000_000.0) | {
        "head_dim": 128,
        "qk_norm": True,
        "norm_eps": 1e-6,
    }


def gemma2(dim: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn_dim: int, scale_dim: int) -> Settings:
    """Returns settings of Gemma 2 ("Gemma 2: Improving Open Language Models at a Practical Size", 2024, table 1)."""
    return llama(256_000, dim, layers, heads, kv_heads, ffn_dim, 8192) | {
        "head_dim": head_dim,
        "layer_pattern": ("window", "full"),
        "window": 4096,
        "attention_scale": scale_dim**-0.5,
        "attention_softcap": 50.0,
        "output_softcap": 30.0,
        "activation": "gelu_tanh",
        "norm_eps": 1e-6,
        "norm_placement": "both",
        "norm_unit_offset": True,
        "scale_embeddings": True,
        "tie_embeddings": "output",
    }


_GEMMA3_ROTARY = {"base": 1_000_000.0, "window_base": 10_000.0}


def gemma3(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, vocab_size: int, window: int) -> Settings:
    """Returns the settings of Gemma 3's language model ("Gemma 3 Technical Report", 2025, table 1)."""
    return gemma2(dim, layers, heads, kv_heads, 256, ffn_dim, 256) | {
        "vocab_size": vocab_size,
        "max_length": 32_768,
        "layer_pattern": ("window",) * 5 + ("full",),
        "window": window,
        "attention_softcap": None,
        "output_softcap": None,
        "qk_norm": True,
        "rotary": _GEMMA3_ROTARY,
    }


def mixtral(
    vocab_size: int, dim: int, layers: int, heads: int, ffn_dim: int, length: int, router_aux_loss_coef: float
) -> Settings:
    """Returns the settings of Mixtral ("Mixtral of Experts", 2024, table 1) or its successor 8x22B.

    Each token uses two of eight experts. The published weight of the load-balance loss is for the sum over the experts
    of a token and the mean of all layers.
    """
    balance_loss = router_aux_loss_coef * 2 / layers
    return llama(vocab_size, dim, layers, heads, 8, ffn_dim, length, 1_000_000.0) | {
        "ffn": "moe",
        "moe": {"num_experts": 8, "experts_per_token": 2, "balance_loss": balance_loss},
    }


_GPT_TUTORIAL = gpt2(768, 12, 12) | {
    "vocab_size": 50_304,
    "activation": "gelu",
    "dropout": 0.0,
    "attention_dropout": 0.0,
}

PRESETS: dict[str, Settings] = {
    # of a tutorial: a small GPT
    "gpt_tutorial": _GPT_TUTORIAL,
    "gpt2": gpt2(768, 12, 12),
    "gpt2_medium": gpt2(1024, 24, 16),
    "gpt2_large": gpt2(1280, 36, 20),
    "gpt2_xl": gpt2(1600, 48, 25),
    "llama2_7b": llama(32_000, 4096, 32, 32, 32, 11_008, 4096),
    "llama2_13b": llama(32_000, 5120, 40, 40, 40, 13_824, 4096),
    "llama2_70b": llama(32_000, 8192, 80, 64, 8, 28_672, 4096),
    "llama3_8b": llama3(4096, 32, 32, 14_336),
    "llama3_70b": llama3(8192, 80, 64, 28_672),
    "llama3_1_8b": llama3(4096, 32, 32, 14_336, 131_072) | _LLAMA3_1,
    "llama3_1_405b": llama3(16_384, 126, 128, 53_248, 131_072) | _LLAMA3_1,
    "llama3_2_1b": llama3(2048, 16, 32, 8192, 131_072) | _LLAMA3_2,
    "llama3_2_3b": llama3(3072, 28, 24, 8192, 131_072) | _LLAMA3_2,
    "mistral_7b": mistral(),
    "qwen2_5_0_5b": qwen2_5(151_936, 896, 24, 14, 2, 4864) | {"tie_embeddings": "output"},
    "qwen2_5_1_5b": qwen2_5(151_936, 1536, 28, 12, 2, 8960) | {"tie_embeddings": "output"},
    "qwen2_5_7b": qwen2_5(152_064, 3584, 28, 28, 4, 18_944) | {"max_length": 131_072},
    "qwen3_0_6b": qwen3(1024, 28, 16, 8, 3072) | {"tie_embeddings": "output"},
    "qwen3_1_7b": qwen3(2048, 28, 16, 8, 6144) | {"tie_embeddings": "output"},
    "qwen3_8b": qwen3(4096, 36, 32, 8, 12_288),
    "gemma2_2b": gemma2(2304, 26, 8, 4, 256, 9216, 256),
    "gemma2_9b": gemma2(3584, 42, 16, 8, 256, 14_336, 256),
    "gemma2_27b": gemma2(4608, 46, 32, 16, 128, 36_864, 144),
    "gemma3_1b": gemma3(1152, 26, 4, 1, 6912, 262_144, 512),
    "gemma3_4b": gemma3(2560, 34, 8, 4, 10_240, 262_208, 1024)
    | {"max_length": 131_072, "rotary": _GEMMA3_ROTARY | {"scaling": "linear", "factor": 8.0}},
    "mixtral_8x7b": mixtral(32_000, 4096, 32, 32, 14_336, 32_768, 0.02),
    "mixtral_8x22b": mixtral(32_768, 6144, 56, 48, 16_384, 65_536, 0.001),
}
