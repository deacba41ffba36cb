"""Makes small random runs of this package that each architecture of Hugging Face can represent."""

import functools
from pathlib import Path
from typing import Any

from tests.data.trained import trained_tokenizer
from tests.helpers import build, tiny
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.config.layers import MoEConfig
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.runs import run_folder, weights

LLAMA: dict[str, Any] = {
    "ffn": "gated",
    "norm": "rmsnorm",
    "activation": "silu",
    "position": "rotary",
    "tie_embeddings": "output",
    "scale_embeddings": False,
    "attention_bias": (),
    "ffn_bias": False,
}
GEMMA = LLAMA | {
    "norm_placement": "both",
    "norm_unit_offset": True,
    "scale_embeddings": True,
    "activation": "gelu_tanh",
    "window": 4,
    "layer_pattern": ("window", "full"),
    "decoder_layers": 2,
}
OLMO = {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "width"}
POST = {"norm_placement": "post", "tie_embeddings": "all", "output_bias": True}
BERT = {
    "norm_placement": "post",
    "position": "learned",
    "embedding_norm": True,
    "token_types": 2,
    "norm_eps": 1e-12,
    "scale_embeddings": False,
    "activation": "gelu",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("decoder_lm", LLAMA | {"num_kv_heads": 2}),
    "bart": (
        "seq2seq",
        POST | {"position": "learned", "position_offset": 2, "embedding_norm": True, "activation": "gelu"},
    ),
    "bert": ("classifier", BERT | {"pooling": "first", "pooler": True, "tie_embeddings": "none"}),
    "gpt2": (
        "decoder_lm",
        {
            "attention_projections": "fused_qkv",
            "position": "learned",
            "activation": "gelu_tanh",
            "scale_embeddings": False,
            "tie_embeddings": "output",
        },
    ),
    "t5": (
        "seq2seq",
        {
            "norm": "rmsnorm",
            "position": "relative",
            "attention_bias": (),
            "attention_scale": 1.0,
            "ffn_bias": False,
            "scale_embeddings": False,
            "scale_output": True,
            "tie_embeddings": "all",
        },
    ),
    "marian": ("seq2seq", POST | {"position": "sinusoidal_halves"}),
    "mistral": ("decoder_lm", LLAMA | {"window": 4, "layer_pattern": ("window",)}),
    "qwen2": ("decoder_lm", LLAMA | {"attention_bias": ("query", "key", "value")}),
    "qwen3": ("decoder_lm", LLAMA | {"qk_norm": True}),
    "smollm3": ("decoder_lm", LLAMA | {"layer_pattern": ("full", "nope"), "decoder_layers": 2}),
    "stablelm": ("decoder_lm", LLAMA | {"norm": "layernorm"}),
    "gemma": ("decoder_lm", LLAMA | {"norm_unit_offset": True, "scale_embeddings": True, "activation": "gelu_tanh"}),
    "ministral": ("decoder_lm", LLAMA | {"window": 4, "layer_pattern": ("full", "window"), "decoder_layers": 2}),
    "cwm": ("decoder_lm", LLAMA | {"window": 4, "layer_pattern": ("window", "full"), "decoder_layers": 2}),
    "arcee": ("decoder_lm", LLAMA | {"ffn": "mlp", "activation": "relu_squared"}),
    "seed_oss": ("decoder_lm", LLAMA | {"attention_bias": ("query", "key", "value")}),
    "phi3": ("decoder_lm", LLAMA | {"num_kv_heads": 2, "window": 4, "layer_pattern": ("window",)}),
    "hunyuan_v1_dense": ("decoder_lm", LLAMA | {"qk_norm": True, "qk_norm_over": "rotated_heads"}),
    "olmo2": ("decoder_lm", LLAMA | OLMO),
    "olmo3": (
        "decoder_lm",
        LLAMA | OLMO | {"window": 4, "layer_pattern": ("window", "full"), "decoder_layers": 2},
    ),
    "granite": (
        "decoder_lm",
        LLAMA | {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "output_divisor": 3.0},
    ),
    "gemma2": ("decoder_lm", GEMMA | {"attention_softcap": 5.0, "output_softcap": 9.0}),
    "gemma3_text": ("decoder_lm", GEMMA | {"qk_norm": True}),
    "mixtral": ("decoder_lm", LLAMA | {"ffn": "moe", "moe": MoEConfig(num_experts=4, expert_gated=True)}),
    "qwen2_moe": (
        "decoder_lm",
        LLAMA
        | {
            "attention_bias": ("query", "key", "value"),
            "ffn": "moe",
            "moe": MoEConfig(num_experts=4, expert_gated=True, shared_dim=8, shared_gate=True),
        },
    ),
    "qwen3_moe": (
        "decoder_lm",
        LLAMA | {"qk_norm": True, "ffn": "moe", "moe": MoEConfig(num_experts=4, expert_gated=True)},
    ),
    "bert masked_lm": (
        "masked_lm",
        BERT | {"head_transform": True, "tie_embeddings": "output", "output_bias": True},
    ),
}
"""Families and settings by `model_type`; a word after it names another family."""
DATA = {
    "seq2seq": DataConfig(source="cldr_translation", bucket_lengths=(8,)),
    "decoder_lm": DataConfig(source="stdlib_text", batching="windows", window=8),
    "classifier": DataConfig(source="cldr_language", bucket_lengths=(8,)),
    "masked_lm": DataConfig(source="stdlib_text", batching="windows", window=8, objective="masked_tokens"),
}
TEXTS = ["the cat sat on the mat", "der Hund, 1234 Ωμέγα 漢字 isn't", "\tnew <|endoftext|>"] * 9


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """Returns a tokenizer of this package that is trained on a few sentences."""
    return trained_tokenizer(kind, TEXTS, 400, split_digits=kind in ("bpe", "unigram"))


def make(
    folder: Path,
    name: str,
    kind: str = "bpe",
    *,
    padded: int = 0,
    decode: DecodeConfig | None = None,
    **changes: Any,
) -> Path:
    """Creates the run folder of a model with large random parameters, and returns it.

    Args:
        name: one of `MODELS`.
        kind: kind of the tokenizer.
        padded: number of rows of the vocabulary that the tokenizer does not have.
        changes: settings of the model.
    """
    family, settings = MODELS[name]
    ours = tokenizer(kind)
    sizes = {"vocab_size": ours.vocab_size + padded}
    if family == "seq2seq":
        sizes["source_vocab_size"] = ours.vocab_size + padded
    model = tiny(family, **{**sizes, "max_length": 32, **settings, **changes})
    cfg = Config(name=folder.name, model=model, data=DATA[family], decode=decode or DecodeConfig())
    run_folder.create(folder, cfg, Tokenizers(ours, ours), ["a", "b", "c"] if family == "classifier" else None)
    weights.save(folder, build(model)[1], "last", [], 0)
    return folder
