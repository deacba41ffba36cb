"""An exported model has the same logits in transformers, or is rejected: settings that an architecture ignores."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tests.helpers import assert_close, build, tiny, with_settings
from tests.parity.test_huggingface import TOKENS, B, V
from tformer_jax.base.errors import UserError
from tformer_jax.interop import hf, mapping

GATED: dict[str, Any] = {
    "dim": 16,
    "ffn": "gated",
    "ffn_dim": 12,
    "ffn_bias": False,
    "activation": "silu",
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "attention_bias": (),
    "scale_embeddings": False,
    "position": "rotary",
    "tie_embeddings": "none",
    "decoder_layers": 2,
    "vocab_size": V,
    "max_length": 32,
}
GEMMA = {
    "norm_placement": "both",
    "norm_unit_offset": True,
    "scale_embeddings": True,
    "attention_scale": 0.5,
    "activation": "gelu_tanh",
    "tie_embeddings": "output",
}
EXPERTS = {"ffn": "moe", "moe": {"num_experts": 4, "experts_per_token": 2}}
PLAIN = {
    "llama": {},
    "mistral": {"window": 3, "layer_pattern": ("window",)},
    "mixtral": EXPERTS,
    "qwen2": {"attention_bias": ("query", "key", "value")},
    "qwen3": {"qk_norm": True},
    "smollm3": {"layer_pattern": ("full", "nope")},
    "stablelm": {"norm": "layernorm"},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "qk_norm": True},
}
CHANGES: dict[str, dict[str, Any]] = {
    "ffn_bias": {"ffn_bias": True},
    "attention_bias": {"attention_bias": ("query", "key", "value", "output")},
    "attention_softcap": {"attention_softcap": 0.7},
    "output_softcap": {"output_softcap": 0.7},
}
EXPRESSED = {
    "llama": {"ffn_bias", "attention_bias"},
    "qwen3": {"attention_bias"},
    "smollm3": {"ffn_bias", "attention_bias"},
    "gemma2": {"attention_bias", "attention_softcap", "output_softcap"},
    "gemma3_text": {"attention_bias", "output_softcap"},
}
"""Changes that config.json of each architecture can express, by transformers' code."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("model_type", PLAIN)
def test_a_setting_is_computed_or_rejected(model_type, change, tmp_path):
    model, params = build(tiny("decoder_lm", **{**GATED, **PLAIN[model_type], **CHANGES[change]}))
    if change not in EXPRESSED.get(model_type, ()):
        with pytest.raises(UserError, match=f"^model_type '{model_type}' cannot represent this model: "):
            hf.save(tmp_path / "out", model_type, model.cfg, params)
        return
    hf.save(tmp_path / "out", model_type, model.cfg, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = np.maximum(TOKENS[:B, :5], 3)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert_close(model.apply({"params": params}, tokens), expected, 1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"scan_layers": True}),
        ("qwen2", {"attention_projections": "fused_qkv"}),
        ("gemma2", {"scan_layers": True, "attention_projections": "fused_kv"}),
    ],
)
def test_any_layout_of_the_parameters_is_exported(model_type, changes, tmp_path):
    model, params = build(tiny("decoder_lm", **{**GATED, **PLAIN[model_type], **changes}))
    hf.save(tmp_path, model_type, model.cfg, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = np.maximum(TOKENS[:B, :5], 3)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert_close(model.apply({"params": params}, tokens), expected, 1e-5)


SEQ2SEQ = {
    "bart": {"position": "learned", "position_offset": 2, "embedding_norm": True},
    "marian": {"position": "sinusoidal_halves"},
}


@pytest.mark.parametrize("tied", ["all", "inputs"])
@pytest.mark.parametrize("model_type", SEQ2SEQ)
def test_an_output_head_is_exported_as_tied_or_not(model_type, tied, tmp_path):
    """All arrays are those of the file: the embeddings' copies too, which transformers only ties to a tied head."""
    options = {"norm_placement": "post", "activation": "gelu", "output_bias": True, "scale_embeddings": False}
    model, params = build(tiny("seq2seq", tie_embeddings=tied, **options, **SEQ2SEQ[model_type]), scale=0.3)
    hf.save(tmp_path, model_type, model.cfg, params)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == (tied == "all")
    theirs, loading = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    sources, targets = np.array([[4, 5, 6, 7]]), np.array([[4, 8, 9]])
    with torch.no_grad():
        expected = theirs.eval()(input_ids=torch.tensor(sources), decoder_input_ids=torch.tensor(targets)).logits
    assert_close(model.apply({"params": params}, sources, targets), expected.numpy(), 1e-5)
    assert hf.load(tmp_path)[0].tie_embeddings == tied


@pytest.mark.parametrize("scale", [None, 0.5, 0.25])
def test_separate_projections_are_exported_as_gpt2(scale, tmp_path):
    """An explicit scale of 1 / sqrt(H), 0.5 here, is the default."""
    cfg = tiny("decoder_lm", vocab_size=V, dim=8, num_heads=2, position="learned", activation="gelu_tanh")
    cfg = with_settings(cfg, tie_embeddings="output", scale_embeddings=False, attention_scale=scale)
    model, params = build(cfg)
    if scale == 0.25:
        with pytest.raises(UserError, match="attention_scale=0.25"):
            hf.save(tmp_path, "gpt2", cfg, params)
        return
    hf.save(tmp_path, "gpt2", cfg, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = np.maximum(TOKENS[:B, :5], 3)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert_close(model.apply({"params": params}, tokens), expected, 1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes", "sentence"),
    [
        ("llama", {}, "tie_word_embeddings=False, but it has no lm_head.weight"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 2}, "layer_types with sliding_attention are not supported"),
        ("smollm3", {"no_rope_layers": [0, 0]}, "no_rope_layers without a layer that has positions are not supported"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
            "full_attention and sliding",
        ),
    ],
)
def test_configs_that_transformers_reads_differently_are_rejected(model_type, changes, sentence, tmp_path):
    """A head that llama does not tie would be random there, and Gemma 3 would not read a rotary base for all layers."""
    settings = {**GATED, **PLAIN[model_type], "tie_embeddings": "output"}
    cfg = build(tiny("decoder_lm", **settings))[0].cfg
    config = hf.architecture_of(model_type).config(cfg) | changes
    arrays = {"model.embed_tokens.weight": np.zeros((V, 16), np.float32)}
    config.pop("tie_word_embeddings")
    with pytest.raises(UserError, match=sentence):
        hf._read_settings({"model_type": model_type, **config}, arrays, hf.architecture_of(model_type))


def test_a_transposed_array_is_rejected():
    """Regression test: an array of the right size in another order of axes was read as it lay."""
    rules, shapes = [mapping.Rule("kernel", "w", mapping.kernel())], {"kernel": jnp.zeros((2, 3))}
    with pytest.raises(UserError, match=r"w of the checkpoint has the shape \(2, 3\); expected: \(3, 2\)"):
        mapping.to_ours(rules, {"w": np.zeros((2, 3), np.float32)}, shapes)


def test_gemma_2_has_full_attention_in_every_second_layer():
    """Regression test: a pattern in config.json was applied, which only Gemma 3 reads."""
    cfg = tiny("decoder_lm", **{**GATED, **GEMMA, "window": 3, "layer_pattern": ("window", "full")})
    config = hf.architecture_of("gemma2").config(cfg) | {"sliding_window_pattern": 3, "layer_types": None}
    arrays = {"model.embed_tokens.weight": np.zeros((V, 16), np.float32)}
    read = hf._read_settings({"model_type": "gemma2", **config}, arrays, hf.architecture_of("gemma2"))
    assert read["layer_pattern"] == ("window", "full")
