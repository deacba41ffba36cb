"""Encoder-decoders: the 2017 Transformer, T5, BART, Marian, M2M-100 and NLLB."""

from tformer_jax.presets.types import Settings


def vaswani(dim: int, heads: int, ffn_dim: int, dropout: float) -> Settings:
    """Returns the settings of a Transformer ("Attention Is All You Need", 2017, table 3).

    English and German share one vocabulary of 37,000 tokens.
    """
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


def _sizes(vocab_size: int, max_length: int, dim: int, layers: int, heads: int, ffn_dim: int) -> Settings:
    """Returns the sizes of a model with one vocabulary, and as many layers in its encoder as in its decoder."""
    return {
        "vocab_size": vocab_size,
        "source_vocab_size": vocab_size,
        "max_length": max_length,
        "dim": dim,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "num_heads": heads,
        "ffn_dim": ffn_dim,
    }


def t5(dim: int, layers: int, heads: int, head_dim: int, ffn_dim: int) -> Settings:
    """Returns the settings of T5.

    "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).
    """
    return _sizes(32_128, 512, dim, layers, heads, ffn_dim) | {
        "head_dim": head_dim,
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


def t5_v1_1(dim: int, layers: int, heads: int, head_dim: int, ffn_dim: int) -> Settings:
    """Returns the settings of T5 1.1: GEGLU ("GLU Variants Improve Transformer", 2020), no dropout, a separate head."""
    return t5(dim, layers, heads, head_dim, ffn_dim) | {
        "ffn": "gated",
        "activation": "gelu_tanh",
        "tie_embeddings": "inputs",
        "scale_output": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "ffn_dropout": 0.0,
    }


def bart(dim: int, layers: int, heads: int) -> Settings:
    """Returns the settings of BART ("BART: Denoising Sequence-to-Sequence Pre-training", 2020).

    Positions start at row 2 of their tables.
    """
    return _sizes(50_265, 1024, dim, layers, heads, 4 * dim) | {
        "activation": "gelu",
        "norm_placement": "post",
        "position": "learned",
        "position_offset": 2,
        "embedding_norm": True,
        "tie_embeddings": "all",
        "scale_embeddings": False,
        "attention_dropout": 0.1,
        "ffn_dropout": 0.1,
        "initializer": "normal",
    }


def m2m_100(vocab_size: int) -> Settings:
    """Returns the settings of M2M-100 ("Beyond English-Centric Multilingual Machine Translation", 2021) or NLLB.

    Positions start after padding's id of 1.
    """
    return _sizes(vocab_size, 1024, 1024, 12, 16, 4096) | {
        "position": "sinusoidal_fairseq",
        "position_offset": 2,
        "tie_embeddings": "all",
        "attention_dropout": 0.1,
        "initializer": "normal",
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

PRESETS: dict[str, Settings] = {
    # "Attention Is All You Need" (2017)
    "vaswani2017_base": vaswani(512, 8, 2048, 0.1),
    "vaswani2017_big": vaswani(1024, 16, 4096, 0.3),
    # "OPUS-MT: Building open translation services for the World" (2020), English to German, in Marian's architecture
    "opus_mt": vaswani(512, 8, 2048, 0.1)
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
    "annotated_transformer": vaswani(512, 8, 2048, 0.1)
    | {
        "attention_bias": ("query", "key", "value", "output"),
        "norm_placement": "pre",
        "tie_embeddings": "none",
        "output_bias": True,
        "attention_dropout": 0.1,
        "ffn_dropout": 0.1,
    },
    # of two tutorials on translation
    "rmsnorm_post_translator": _RMS_POST,
    "pre_norm_translator": _PRE_LN,
    "t5_small": t5(512, 6, 8, 64, 2048),
    "t5_base": t5(768, 12, 12, 64, 3072),
    "t5_large": t5(1024, 24, 16, 64, 4096),
    "t5_3b": t5(1024, 24, 32, 128, 16_384),
    "t5_11b": t5(1024, 24, 128, 128, 65_536),
    "t5_v1_1_small": t5_v1_1(512, 8, 6, 64, 1024),
    "t5_v1_1_base": t5_v1_1(768, 12, 12, 64, 2048),
    "t5_v1_1_large": t5_v1_1(1024, 24, 16, 64, 2816),
    "t5_v1_1_xl": t5_v1_1(2048, 24, 32, 64, 5120),
    "t5_v1_1_xxl": t5_v1_1(4096, 24, 64, 64, 10_240),
    "bart_base": bart(768, 6, 12),
    "bart_large": bart(1024, 12, 16),
    "m2m_100_418m": m2m_100(128_112),
    # "No Language Left Behind: Scaling Human-Centered Machine Translation" (2022), distilled
    "nllb_200_600m": m2m_100(256_206),
}
