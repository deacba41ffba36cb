"""Published architectures by name, with the paper or report that describes each.

A config file can change any of their settings: `ModelConfig(**presets.settings("gpt2") | {"dropout": 0.0})`. A
dictionary such as `{"rotary": {"base": 500.0}}` replaces all settings of that section.
"""

from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.config.fields import ConfigError, nearest

Settings = dict[str, Any]

LAYERS_OF_QWEN3: Settings = {
    "attention_bias": (),
    "qk_norm": True,
    "position": "rotary",
    "ffn": "gated",
    "activation": "silu",
    "ffn_bias": False,
    "norm": "rmsnorm",
}
"""Layers of "Qwen3 Technical Report" (2025), for models of any size: those of Llama, with QK-norm."""


def settings(name: str) -> Settings:
    """Returns the settings of a preset that differ from `ModelConfig`'s defaults.

    Raises:
        ConfigError: `name` is not a preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not known{nearest(name, PRESETS)}")
    return dict(PRESETS[name])


def for_data(name: str) -> Settings:
    """Returns the settings of a preset, without the sizes that training takes from the data."""
    return settings(name) | {"vocab_size": None, "source_vocab_size": None, "num_classes": None}


def build(name: str, **changes: Any) -> ModelConfig:
    """Builds the config of a preset with some settings changed."""
    return ModelConfig(**settings(name) | changes)


def _vaswani(dim: int, heads: int, ffn_dim: int, dropout: float) -> Settings:
    """ "Attention Is All You Need" (2017), table 3; one vocabulary of 37,000 for English and German."""
    return {
        "vocab_size": 37_000,
        "source_vocab_size": 37_000,
        "max_length": 512,
        "dim": dim,
        "num_heads": heads,
        "ffn_dim": ffn_dim,
        "attention_bias": (),
        "norm_placement": "post",
        "tie_embeddings": "all",
        "dropout": dropout,
    }


def _gpt2(dim: int, layers: int, heads: int) -> Settings:
    """ "Language Models are Unsupervised Multitask Learners" (2019), table 2."""
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


def _t5(dim: int, layers: int, heads: int, head_dim: int, ffn_dim: int) -> Settings:
    """ "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020)."""
    return {
        "vocab_size": 32_128,
        "source_vocab_size": 32_128,
        "max_length": 512,
        "dim": dim,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "num_heads": heads,
        "head_dim": head_dim,
        "ffn_dim": ffn_dim,
        "attention_bias": (),
        "attention_scale": 1.0,
        "ffn_bias": False,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "position": "relative",
        "tie_embeddings": "all",
        "scale_embeddings": False,
        "scale_output": True,
        "attention_dropout": 0.1,
        "ffn_dropout": 0.1,
        "initializer": "fan_in",
        "init_std": dim**-0.5,
        "embedding_std": 1.0,
    }


def _t5_v1_1(dim: int, layers: int, heads: int, head_dim: int, ffn_dim: int) -> Settings:
    """T5 1.1: GEGLU ("GLU Variants Improve Transformer", 2020), no dropout, a separate output head."""
    return _t5(dim, layers, heads, head_dim, ffn_dim) | {
        "ffn": "gated",
        "activation": "gelu_tanh",
        "tie_embeddings": "inputs",
        "scale_output": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "ffn_dropout": 0.0,
    }


def _bart(dim: int, layers: int, heads: int) -> Settings:
    """ "BART: Denoising Sequence-to-Sequence Pre-training" (2020); positions start at row 2 of their tables."""
    return {
        "vocab_size": 50_265,
        "source_vocab_size": 50_265,
        "max_length": 1024,
        "dim": dim,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "num_heads": heads,
        "ffn_dim": 4 * dim,
        "activation": "gelu",
        "norm_placement": "post",
        "position": "learned",
        "position_offset": 2,
        "embedding_norm": True,
        "tie_embeddings": "all",
        "scale_embeddings": False,
        "initializer": "normal",
    }


def _llama(
    vocab_size: int, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, length: int, base: float = 10_000.0
) -> Settings:
    """ "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023) and similar models."""
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


def _llama3(dim: int, layers: int, heads: int, ffn_dim: int, length: int = 8192) -> Settings:
    """ "The Llama 3 Herd of Models" (2024), table 3."""
    return _llama(128_256, dim, layers, heads, 8, ffn_dim, length, 500_000.0)


def _mistral() -> Settings:
    """ "Mistral 7B" (2023), table 1."""
    return _llama(32_000, 4096, 32, 32, 8, 14_336, 32_768) | {"window": 4096, "layer_pattern": ("window",)}


def _qwen2_5(vocab_size: int, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> Settings:
    """ "Qwen2.5 Technical Report" (2024), table 1: biases of queries, keys and values."""
    return _llama(vocab_size, dim, layers, heads, kv_heads, ffn_dim, 32_768, 1_000_000.0) | {
        "attention_bias": ("query", "key", "value"),
        "norm_eps": 1e-6,
    }


def _qwen3(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> Settings:
    """ "Qwen3 Technical Report" (2025), table 1: queries and keys are normalized, heads have 128 features."""
    return _llama(151_936, dim, layers, heads, kv_heads, ffn_dim, 40_960, 1_000_000.0) | {
        "head_dim": 128,
        "qk_norm": True,
        "norm_eps": 1e-6,
    }


def _gemma2(dim: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn_dim: int, scale_dim: int) -> Settings:
    """ "Gemma 2: Improving Open Language Models at a Practical Size" (2024), table 1."""
    return _llama(256_000, dim, layers, heads, kv_heads, ffn_dim, 8192) | {
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


def _gemma3(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, vocab_size: int, window: int) -> Settings:
    """ "Gemma 3 Technical Report" (2025), table 1 (the language model): five sliding-window layers per full layer."""
    return _gemma2(dim, layers, heads, kv_heads, 256, ffn_dim, 256) | {
        "vocab_size": vocab_size,
        "max_length": 32_768,
        "layer_pattern": ("window",) * 5 + ("full",),
        "window": window,
        "attention_softcap": None,
        "output_softcap": None,
        "qk_norm": True,
        "rotary": _GEMMA3_ROTARY,
    }


def _mixtral(dim: int, layers: int, heads: int, ffn_dim: int, length: int) -> Settings:
    """ "Mixtral of Experts" (2024), table 1: eight experts, two per token."""
    return _llama(32_000 if dim == 4096 else 32_768, dim, layers, heads, 8, ffn_dim, length, 1_000_000.0) | {
        "ffn": "moe",
        "moe": {"num_experts": 8, "experts_per_token": 2, "balance_loss": 0.001},
    }


_GPT_TUTORIAL = _gpt2(768, 12, 12) | {
    "vocab_size": 50_304,
    "activation": "gelu",
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_CLASSIFIER = {
    "family": "classifier",
    "vocab_size": 50_000,
    "num_classes": 2,
    "max_length": 512,
    "dim": 128,
    "encoder_layers": 6,
    "num_heads": 8,
    "ffn_dim": 512,
    "attention_bias": ("output",),
    "norm_placement": "post",
    "position": "learned",
    "tie_embeddings": "none",
    "scale_embeddings": False,
}
_RMS_POST = {
    "vocab_size": 10_000,
    "source_vocab_size": 10_000,
    "dim": 512,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_heads": 8,
    "head_dim": 64,
    "ffn_dim": 2048,
    "ffn_bias": False,
    "activation": "silu",
    "attention_bias": (),
    "norm": "rmsnorm",
    "norm_placement": "post",
    "tie_embeddings": "none",
    "scale_embeddings": False,
    "embedding_std": 1.0,
    "output_bias": True,
}
_PRE_LN = {
    "vocab_size": 10_000,
    "source_vocab_size": 10_000,
    "dim": 512,
    "attention_bias": (),
    "attention_dropout": 0.1,
    "ffn_dropout": 0.1,
    "tie_embeddings": "inputs",
    "scale_embeddings": False,
    "initializer": "normal",
}
_BERT = {
    "family": "classifier",
    "vocab_size": 30_522,
    "num_classes": 2,
    "max_length": 512,
    "dim": 768,
    "encoder_layers": 12,
    "num_heads": 12,
    "ffn_dim": 3072,
    "activation": "gelu",
    "norm_placement": "post",
    "norm_eps": 1e-12,
    "position": "learned",
    "embedding_norm": True,
    "token_types": 2,
    "tie_embeddings": "none",
    "scale_embeddings": False,
    "pooling": "first",
    "pooler": True,
    "attention_dropout": 0.1,
    "initializer": "normal",
}
_BERT_LARGE = {"dim": 1024, "encoder_layers": 24, "num_heads": 16, "ffn_dim": 4096}
_OF_CLASSIFIERS = {"num_classes", "pooling", "pooler"}
_BERT_MLM = {name: value for name, value in _BERT.items() if name not in _OF_CLASSIFIERS} | {
    "family": "masked_lm",
    "tie_embeddings": "output",
    "output_bias": True,
    "head_transform": True,
}

PRESETS: dict[str, Settings] = {
    # "Attention Is All You Need" (2017)
    "vaswani2017_base": _vaswani(512, 8, 2048, 0.1),
    "vaswani2017_big": _vaswani(1024, 16, 4096, 0.3),
    # "OPUS-MT: Building open translation services for the World" (2020), English to German, in Marian's architecture
    "opus_mt": _vaswani(512, 8, 2048, 0.1)
    | {
        "vocab_size": 58_101,
        "source_vocab_size": 58_101,
        "attention_bias": ("query", "key", "value", "output"),
        "activation": "silu",
        "position": "sinusoidal_halves",
        "output_bias": True,
        "initializer": "normal",
    },
    # "The Annotated Transformer" (2018): norms before the sub-layers, biases, three embeddings
    "annotated_transformer": _vaswani(512, 8, 2048, 0.1)
    | {
        "attention_bias": ("query", "key", "value", "output"),
        "norm_placement": "pre",
        "tie_embeddings": "none",
        "output_bias": True,
        "attention_dropout": 0.1,
        "ffn_dropout": 0.1,
    },
    # the architectures of the tutorials that this project is based on
    "gpt_tutorial": _GPT_TUTORIAL,
    "sequence_classifier": _CLASSIFIER,
    "rmsnorm_post_translator": _RMS_POST,
    "pre_norm_translator": _PRE_LN,
    "gpt2": _gpt2(768, 12, 12),
    "gpt2_medium": _gpt2(1024, 24, 16),
    "gpt2_large": _gpt2(1280, 36, 20),
    "gpt2_xl": _gpt2(1600, 48, 25),
    # "BERT: Pre-training of Deep Bidirectional Transformers" (2019), with a head for two classes, or for masked tokens
    "bert_base": _BERT,
    "bert_large": _BERT | _BERT_LARGE,
    "bert_base_mlm": _BERT_MLM,
    "bert_large_mlm": _BERT_MLM | _BERT_LARGE,
    "t5_small": _t5(512, 6, 8, 64, 2048),
    "t5_base": _t5(768, 12, 12, 64, 3072),
    "t5_large": _t5(1024, 24, 16, 64, 4096),
    "t5_3b": _t5(1024, 24, 32, 128, 16_384),
    "t5_11b": _t5(1024, 24, 128, 128, 65_536),
    "t5_v1_1_small": _t5_v1_1(512, 8, 6, 64, 1024),
    "t5_v1_1_base": _t5_v1_1(768, 12, 12, 64, 2048),
    "t5_v1_1_large": _t5_v1_1(1024, 24, 16, 64, 2816),
    "t5_v1_1_xl": _t5_v1_1(2048, 24, 32, 64, 5120),
    "t5_v1_1_xxl": _t5_v1_1(4096, 24, 64, 64, 10_240),
    "bart_base": _bart(768, 6, 12),
    "bart_large": _bart(1024, 12, 16),
    "llama2_7b": _llama(32_000, 4096, 32, 32, 32, 11_008, 4096),
    "llama2_13b": _llama(32_000, 5120, 40, 40, 40, 13_824, 4096),
    "llama2_70b": _llama(32_000, 8192, 80, 64, 8, 28_672, 4096),
    "llama3_8b": _llama3(4096, 32, 32, 14_336),
    "llama3_70b": _llama3(8192, 80, 64, 28_672),
    "llama3_1_8b": _llama3(4096, 32, 32, 14_336, 131_072) | _LLAMA3_1,
    "llama3_1_405b": _llama3(16_384, 126, 128, 53_248, 131_072) | _LLAMA3_1,
    "llama3_2_1b": _llama3(2048, 16, 32, 8192, 131_072) | _LLAMA3_2,
    "llama3_2_3b": _llama3(3072, 28, 24, 8192, 131_072) | _LLAMA3_2,
    "mistral_7b": _mistral(),
    "qwen2_5_0_5b": _qwen2_5(151_936, 896, 24, 14, 2, 4864) | {"tie_embeddings": "output"},
    "qwen2_5_1_5b": _qwen2_5(151_936, 1536, 28, 12, 2, 8960) | {"tie_embeddings": "output"},
    "qwen2_5_7b": _qwen2_5(152_064, 3584, 28, 28, 4, 18_944),
    "qwen3_0_6b": _qwen3(1024, 28, 16, 8, 3072) | {"tie_embeddings": "output"},
    "qwen3_1_7b": _qwen3(2048, 28, 16, 8, 6144) | {"tie_embeddings": "output"},
    "qwen3_8b": _qwen3(4096, 36, 32, 8, 12_288),
    "gemma2_2b": _gemma2(2304, 26, 8, 4, 256, 9216, 256),
    "gemma2_9b": _gemma2(3584, 42, 16, 8, 256, 14_336, 256),
    "gemma2_27b": _gemma2(4608, 46, 32, 16, 128, 36_864, 144),
    "gemma3_1b": _gemma3(1152, 26, 4, 1, 6912, 262_144, 512),
    "gemma3_4b": _gemma3(2560, 34, 8, 4, 10_240, 262_208, 1024)
    | {"max_length": 131_072, "rotary": _GEMMA3_ROTARY | {"scaling": "linear", "factor": 8.0}},
    "mixtral_8x7b": _mixtral(4096, 32, 32, 14_336, 32_768),
    "mixtral_8x22b": _mixtral(6144, 56, 48, 16_384, 65_536),
}
