"""Scaled rotary positions equal those of transformers' rotary modules."""

import jax.numpy as jnp
import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from tests.helpers import assert_close
from tests.parity.test_published_configs import LLAMA, read
from tests.parity.test_published_configs import SIZES as ENCODER
from tformer_jax.base.errors import UserError
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


HALVES = {**LLAMA, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODULES = {
    "gemma3_text": (transformers.Gemma3TextConfig, Gemma3RotaryEmbedding, HALVES),
    "olmo3": (transformers.Olmo3Config, Olmo3RotaryEmbedding, HALVES),
    "modernbert": (transformers.ModernBertConfig, ModernBertRotaryEmbedding, ENCODER),
}
"""Config, rotations and sizes of architectures whose kinds of layers have their own rotations."""
LINEAR = {"rope_type": "linear", "factor": 4.0}
OLD = {"type": "linear", "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 77.0}
FIELDS = {
    "nothing": {},
    "rope_scaling": {"rope_scaling": LINEAR},
    "rope_scaling, older": {"rope_scaling": OLD},
    "rope_parameters": {"rope_parameters": LINEAR | {"rope_theta": 99.0}},
    **{
        f"rope_parameters by kind{name}": {
            "rope_parameters": {"full_attention": fields | {"rope_theta": 99.0}, "sliding_attention": LOCAL}
        }
        for name, fields in {"": LINEAR, ", older": OLD}.items()
    },
}
"""Fields of config.json about rotations."""
REFUSED = {"gemma3_text": 2, "olmo3": 2, "modernbert": 3}
"""Numbers of `FIELDS` that are refused."""


@pytest.mark.parametrize("kind", MODULES)
def test_rotations_of_two_kinds_of_layers_are_those_of_transformers_or_refused(kind):
    """Regression test: an older `type` and a scaling of ModernBERT gave other rotations than in transformers."""
    make, module, sizes = MODULES[kind]
    refused = []
    for name, fields in FIELDS.items():
        try:
            cfg = read(kind, sizes | fields)
        except UserError:
            refused.append(name)
            continue
        theirs = module(make(**sizes, **fields))
        for layer, window in (("full_attention", False), ("sliding_attention", True)):
            expected = theirs(torch.zeros(1), torch.tensor([POSITIONS]), layer)[0][..., : cfg.head_size // 2].numpy()
            positions = make_attention_positions(cfg, bidirectional=False)
            rotation = positions.apply({}, jnp.array([POSITIONS]), window=window).rotation
            assert_close(rotation.cos[:, :, 0], expected, 1e-5)
    assert len(refused) == REFUSED[kind], refused
