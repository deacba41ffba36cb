"""Settings and arrays of checkpoints are read or ignored as transformers does."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.helpers import assert_close
from tests.parity import test_huggingface as parity
from tformer_jax.interop import hf
from tformer_jax.models import registry


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_the_window_of_mistral_holds_in_all_layers(name, tmp_path):
    parity.their_model(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    theirs = getattr(transformers, parity.MODELS[name][0]).from_pretrained(tmp_path, attn_implementation="eager").eval()
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
