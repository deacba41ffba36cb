"""Scaled rotary positions equal those of transformers' rotary modules."""

import jax.numpy as jnp
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.helpers import assert_close
from tests.parity.test_published_configs import LLAMA, read
from tformer_jax.nn.attention_positions import make_attention_positions

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS = {
    "yarn": YARN,
    "yarn, attention_factor and betas": YARN | {"attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 4.0},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, only attention_factor": YARN | {"factor": 1.0, "attention_factor": 1.5},
    "yarn, the length of the model": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
}
SIZES = LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 2}
POSITIONS = range(40)


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_and_magnitudes_equal_those_of_transformers(name):
    cfg = read("llama", SIZES | {"rope_parameters": SCALINGS[name]})
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**SIZES, rope_parameters=SCALINGS[name]))
    cos, sin = theirs(torch.zeros(1), torch.tensor([POSITIONS]))
    rotation = (
        make_attention_positions(cfg, bidirectional=False).apply({}, jnp.array([POSITIONS]), window=False).rotation
    )
    for ours, expected in ((rotation.cos, cos), (rotation.sin, sin)):
        proves = (f"rotary.scaling={name}", "transformers LlamaRotaryEmbedding")
        assert_close(ours[:, :, 0], expected[..., : cfg.head_size // 2].numpy(), 1e-5, proves=proves)
