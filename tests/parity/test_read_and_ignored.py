"""Settings and arrays of checkpoints are read or ignored as transformers does."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.helpers import assert_close, rest_slow
from tests.parity import test_huggingface as parity
from tests.parity.test_published_configs import BARE, read
from tformer_jax.interop import files, hf
from tformer_jax.models import registry

WINDOWS = [
    ("mistral", 3, ["full_attention", "sliding_attention"]),  # which AutoModel reads as Ministral
    ("mistral", 3, ["full_attention"] * 2),
    ("mistral", None, None),
    ("mixtral", 3, ["full_attention", "sliding_attention"]),  # whose layers all have a window
]


@pytest.mark.parametrize("case", rest_slow(WINDOWS, 1))
def test_windows_of_mistral(case, tmp_path):
    name, window, kinds = case
    parity.their_model(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": window}
    config |= {} if kinds is None else {"layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    cfg, params = hf.load(tmp_path)
    with torch.no_grad():
        expected = parity.run_theirs(theirs).numpy()
    assert_close(parity.shown(parity.run_ours(registry.build(cfg), params)), parity.shown(expected), 1e-5)


def test_the_language_model_of_texts_and_images(tmp_path):
    """Gemma 3, as published: a config in another one, without its defaults, and arrays with other names."""
    text = parity.GQA | {"sliding_window": 3, "num_hidden_layers": 6, "vocab_size": 30}
    text = {name: text[name] for name in text if name != "num_attention_heads"} | {"num_key_value_heads": 4}
    vision = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}
    sizes = {"text_config": text, "vision_config": vision | {"image_size": 14, "patch_size": 7}}
    theirs = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**sizes)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "eos_token_id": [1, 106], **sizes}))
    cfg, params = hf.load(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor(parity.TOKENS), attention_mask=torch.tensor(parity.REAL).int()).logits
    assert_close(parity.shown(parity.run_ours(registry.build(cfg), params)), parity.shown(expected.numpy()), 1e-5)
    assert len(files.image_arrays(tmp_path)) > 20
    assert files.read_config(tmp_path)["eos_token_id"] == [1, 106]


@pytest.mark.slow
def test_the_language_model_of_qwen3_5(tmp_path):
    """As published, with a model of images and its rotation in sections."""
    rope = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    text = parity.QWEN3_5 | {"rope_parameters": rope | {"mrope_interleaved": True}}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 8}
    sizes = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    theirs = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**sizes)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    cfg, params = hf.load(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor(parity.TOKENS), attention_mask=torch.tensor(parity.REAL).int()).logits
    assert_close(parity.shown(parity.run_ours(registry.build(cfg), params)), parity.shown(expected.numpy()), 1e-5)
    assert len(files.image_arrays(tmp_path)) > 10


ACTIVATIONS = [
    {"dense_act_fn": "silu", "feed_forward_proj": "relu", "is_gated_act": True},
    {"dense_act_fn": "gelu"},
    {"feed_forward_proj": "gated-gelu"},
]


@pytest.mark.parametrize("changes", rest_slow(ACTIVATIONS, 1))
def test_the_activation_of_t5(changes, tmp_path):
    """transformers reads `feed_forward_proj` only for what `dense_act_fn` and `is_gated_act` do not say."""
    parity.their_model("t5 1.1").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("dense_act_fn", "is_gated_act")} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    cfg, params = hf.load(tmp_path)
    with torch.no_grad():
        expected = parity.run_theirs(theirs).numpy()
    assert_close(parity.shown(parity.run_ours(registry.build(cfg), params)), parity.shown(expected), 1e-5)


def test_t5_has_no_positions_in_cross_attention(tmp_path):
    """The published checkpoints have an array of them."""
    parity.their_model("t5 1.0").save_pretrained(tmp_path)
    _, expected = hf.load(tmp_path)
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones((8, 4), np.float32)}
    arrays = load_file(tmp_path / "model.safetensors") | unused
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, params = hf.load(tmp_path)
    parity.jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_bart_has_numbers_of_its_format(prefix, tmp_path):
    """Regression test: published checkpoints have them, and were refused."""
    theirs = parity.their_model("bart")
    theirs.save_pretrained(tmp_path)
    expected, arrays = hf.load(tmp_path), load_file(tmp_path / "model.safetensors")
    arrays = {name.replace("model.", prefix, 1): array for name, array in arrays.items() if name != "lm_head.weight"}
    versions = {f"{prefix}{stack}.version": np.full(1, 3, np.float32) for stack in ("encoder", "decoder")}
    save_file(arrays | versions, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], expected[1])


def t5_rates(config):
    first, *_, last = transformers.T5ForConditionalGeneration(config).decoder.block[0].layer
    return first.dropout.p, first.SelfAttention.dropout, last.DenseReluDense.dropout.p


def bart_rates(config):
    layer = transformers.BartForConditionalGeneration(config).model.decoder.layers[0]
    return layer.dropout, layer.self_attn.dropout, layer.activation_dropout


def bert_rates(config):
    layer = transformers.BertModel(config).encoder.layer[0]
    return layer.output.dropout.p, layer.attention.self.dropout.p, 0.0


def gpt2_rates(config):
    layer = transformers.GPT2LMHeadModel(config).transformer.h[0]
    return layer.mlp.dropout.p, layer.attn.attn_dropout.p, 0.0


RATES = {
    "t5": (transformers.T5Config, t5_rates, {"dropout_rate": 0.3}),
    "bart": (transformers.BartConfig, bart_rates, {"attention_dropout": 0.2, "activation_dropout": 0.3}),
    "bert": (transformers.BertConfig, bert_rates, {"attention_probs_dropout_prob": 0.2, "hidden_size": 96}),
    "gpt2": (transformers.GPT2Config, gpt2_rates, {"attn_pdrop": 0.2}),
}


@pytest.mark.parametrize("model_type", RATES)
def test_dropout_rates_are_those_of_their_modules(model_type):
    """Of outputs of sub-layers, attention weights and hidden features of FFNs."""
    config_class, rates, changes = RATES[model_type]
    config = BARE.get(model_type, parity.SIZES) | changes
    cfg = read(model_type, config)
    assert (cfg.dropout, cfg.attention_dropout, cfg.ffn_dropout) == rates(config_class(**config))
