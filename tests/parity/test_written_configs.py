"""Configs that are exported read as the same model, or are refused."""

import numpy as np
import pytest
import transformers

from tests.helpers import build, tiny, with_settings
from tests.parity import test_huggingface as parity
from tformer_jax.base.errors import UserError
from tformer_jax.interop import hf, settings_comparison
from tformer_jax.interop.encoder_decoders import ENCODER_DECODERS

PLAIN = {
    "llama": {"ffn": "gated", "ffn_bias": False, "attention_bias": (), "norm": "rmsnorm", "position": "rotary"},
    "gpt2": {"attention_projections": "fused_qkv", "position": "learned", "activation": "gelu_tanh"},
    "gemma2": {"ffn": "gated", "ffn_bias": False, "attention_bias": (), "norm": "rmsnorm", "position": "rotary"},
}
PLAIN["llama"] |= {"head_dim": 4, "scale_embeddings": False}
PLAIN["gpt2"] |= {"scale_embeddings": False}
PLAIN["gemma2"] |= {"head_dim": 4, "norm_placement": "both", "norm_unit_offset": True}
EXPERTS = {"ffn": "moe"}
HEADS = {"num_heads": 2, "head_dim": None}
OLMO = {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "width"}
OTHERS = {
    "interleaved rotary": ("llama", {"rotary": {"pairing": "interleaved"}}),
    "scaled embeddings": ("llama", {"scale_embeddings": True}),
    "soft-capped scores": ("llama", {"attention_softcap": 5.0}),
    "soft-capped logits": ("llama", {"output_softcap": 5.0}),
    "another scale": ("llama", {"attention_scale": 0.3}),
    "ALiBi": ("llama", {"position": "alibi"}),
    "windows": ("llama", {"window": 2, "layer_pattern": ("window",)}),
    "unit offset": ("llama", {"norm_unit_offset": True}),
    "scaled output": ("llama", {"scale_output": True}),
    "sinks": ("llama", {"attention_sinks": True}),
    "a fraction rotated": ("llama", {"rotary": {"fraction": 0.5}}),
    "another head size": ("stablelm", {"norm": "layernorm", "rotary": {"fraction": 0.5}}),
    "a layer without positions, Qwen": (
        "qwen3",
        {"qk_norm": True, "layer_pattern": ("full", "nope"), "decoder_layers": 2},
    ),
    "a layer without positions, Gemma": ("gemma2", {"layer_pattern": ("full", "nope"), "decoder_layers": 2}),
    "a layer without positions": ("llama", {"layer_pattern": ("full", "nope"), "decoder_layers": 2}),
    "dense layers of Mixtral": ("mixtral", {**EXPERTS, "decoder_layers": 2, "moe": {"every": 2}}),
    "a shared expert without a gate": ("qwen2_moe", {**EXPERTS, "moe": {"shared_dim": 5}}),
    "no shared expert": ("qwen2_moe", {**EXPERTS, "attention_bias": ("query", "key", "value")}),
    "prefix LM": ("llama", {"prefix_lm": True}),
    "sinusoids": ("gpt2", {"position": "sinusoidal"}),
    "a scale that is no integer": ("gemma2", {"attention_scale": 0.3}),
    "scaled positions of windows": (
        "olmo3",
        {**OLMO, "window": 2, "layer_pattern": ("window", "full"), "decoder_layers": 2, "head_dim": None}
        | {"rotary": {"scaling": "yarn", "factor": 4.0, "original_length": 8}},
    ),
    "norms of rotated heads": ("qwen3", {"qk_norm": True, "qk_norm_over": "rotated_heads"}),
    "a multiplier": ("llama", {"residual_multiplier": 0.5}),
    "a scaled rotation": ("phi3", {"rotary": {"scaling": "linear", "factor": 2.0}}),
    "mixed windows": ("mistral", {"window": 2, "layer_pattern": ("window", "full"), "decoder_layers": 2}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_would_load_as_another_model_is_not_written(name, tmp_path):
    model_type, changes = OTHERS[name]
    _, params = build(tiny("decoder_lm", **PLAIN.get(model_type, PLAIN["llama"]) | changes))
    cfg = tiny("decoder_lm", **PLAIN.get(model_type, PLAIN["llama"]) | changes)
    with pytest.raises(UserError, match=f"^model_type '{model_type}' cannot represent this model: (?!this checkpoint)"):
        hf.save(tmp_path / "out", model_type, cfg, params)
    assert not (tmp_path / "out").exists()


BASES = {"rotary": {"scaling": "yarn", "factor": 4.0, "window_base": 10_000.0, "original_length": 8}}
EXACT = {
    "llama": ("llama", {"attention_bias": (), "tie_embeddings": "none", "rotary": {"base": 77.0}}),
    "llama, scaled": ("llama", {"rotary": {"scaling": "llama3", "factor": 4.0, "original_length": 8}}),
    "llama, YaRN": ("llama", {"rotary": {"scaling": "yarn", "factor": 4.0, "beta_slow": 2.0, "attention_factor": 0.9}}),
    "mistral": ("mistral", {"window": 2, "layer_pattern": ("window",)}),
    "qwen2": ("qwen2", {"attention_bias": ("query", "key", "value"), "window": 3, "layer_pattern": ("full", "window")}),
    "qwen3": ("qwen3", {"qk_norm": True, "window": 3, "layer_pattern": ("window",)}),
    "smollm3": ("smollm3", {"layer_pattern": ("full", "nope")}),
    "stablelm": ("stablelm", {**HEADS, "norm": "layernorm", "rotary": {"fraction": 0.5}}),
    "stablelm, whole heads": ("stablelm", {**HEADS, "norm": "layernorm"}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "ffn": "moe",
            "attention_bias": ("query", "key", "value"),
            "moe": {"num_experts": 3, "every": 2, "dense_dim": 7, "shared_dim": 5, "shared_gate": True},
        },
    ),
    "qwen3_moe": ("qwen3_moe", {"ffn": "moe", "qk_norm": True, "moe": {"dense_layers": 1, "dense_dim": 7}}),
    "gemma": ("gemma", {"norm_unit_offset": True, "scale_embeddings": True}),
    "ministral": ("ministral", {"window": 3, "layer_pattern": ("full", "window")}),
    "cwm": ("cwm", {"window": 3, "layer_pattern": ("window", "full", "window")}),
    "arcee": ("arcee", {"ffn": "mlp", "activation": "relu_squared"}),
    "seed_oss": ("seed_oss", {"attention_bias": ("query", "key", "value")}),
    "phi3": ("phi3", {**HEADS, "rotary": {"fraction": 0.5}, "attention_projections": "fused_qkv"}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"qk_norm": True, "qk_norm_over": "rotated_heads"}),
    "olmo2": ("olmo2", {"head_dim": None, **OLMO}),
    "olmo3": ("olmo3", {"head_dim": None, **OLMO, "window": 3, "layer_pattern": ("window", "full")} | BASES),
    "olmo3, windows alone": ("olmo3", {"head_dim": None, **OLMO, "window": 3, "layer_pattern": ("window",)}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "output_divisor": 7.0}),
    "gpt2": ("gpt2", {"activation": "relu_squared", "attention_scale": 1.0}),
    "gemma2": ("gemma2", {"attention_softcap": 3.0, "window": 3, "layer_pattern": ("window", "full", "full")}),
    "gemma2, no window": ("gemma2", {"scale_embeddings": True}),
    "gemma3_text": ("gemma3_text", {"qk_norm": True, "window": 3, "layer_pattern": ("window", "full")}),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_written_reads_as_the_same_config_and_parameters(name, tmp_path):
    model_type, changes = EXACT[name]
    plain = PLAIN["gemma2" if model_type == "gemma3_text" else model_type if model_type in PLAIN else "llama"]
    cfg = tiny("decoder_lm", **plain | {"decoder_layers": 3} | changes)
    _, params = build(cfg)
    hf.save(tmp_path, model_type, cfg, params)
    back, same = hf.load(tmp_path)
    assert settings_comparison.differences(cfg, back) == []
    parity.jax.tree.map(np.testing.assert_array_equal, same, params)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    if model_type == "qwen2":
        assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]


def test_t5_with_tied_embeddings_whose_output_is_not_scaled(tmp_path):
    """Regression test: what transformers writes for T5 1.1 without an output head was imported, but not exported."""
    tied = {"ffn": "gated", "norm": "rmsnorm", "position": "relative", "activation": "gelu_tanh", "ffn_bias": False}
    settings = {"attention_bias": (), "scale_embeddings": False, "attention_scale": 1.0, "tie_embeddings": "all"}
    cfg = tiny("seq2seq", **tied, **settings)
    _, params = build(cfg)
    hf.save(tmp_path, "t5", cfg, params)
    assert settings_comparison.differences(cfg, hf.load(tmp_path)[0]) == []


def test_settings_that_only_training_reads_do_not_matter():
    cfg = tiny("decoder_lm", **PLAIN["llama"])
    other = with_settings(
        cfg, dropout=0.3, initializer="normal", scan_layers=True, remat="dots_saveable", dtype="bfloat16"
    )
    assert settings_comparison.differences(cfg, other) == []
    other = with_settings(cfg, num_kv_heads=4, final_norm=True, attention_scale=0.5)
    assert settings_comparison.differences(cfg, other) == []
    other = with_settings(cfg, rotary={"base": 5.0})
    assert settings_comparison.differences(cfg, other) == ["model.rotary.base=10000.0"]


@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_no_layers_are_dropped_in_training(model_type):
    """Regression test: M2M-100 drops layers by default."""
    written = hf.architecture_of(model_type).config(tiny("seq2seq"))
    fields = transformers.AutoConfig.for_model(model_type, **written).to_dict()
    assert not any(value for name, value in fields.items() if name.endswith("layerdrop"))
