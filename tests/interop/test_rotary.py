"""Rotary settings in the forms of transformers 4 and 5, and in both at once."""

from typing import Any

import numpy as np
import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.interop import hf

SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
LINEAR = {"rope_type": "linear", "factor": 2.0}
GEMMA = {"sliding_window": 5, "sliding_window_pattern": 2}
STABLELM = {"num_key_value_heads": 8, "layer_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
OTHERS = {"llama": {}, "stablelm": STABLELM, "gemma3_text": GEMMA}
"""Further fields of the config.json of some model types."""


def read(model_type: str, **config: Any) -> ModelConfig:
    arrays = {"lm_head.weight": np.ones(1)}
    fields = {"model_type": model_type, **SIZES, **config}
    return ModelConfig(**hf._read_settings(fields, arrays, hf.ARCHITECTURES[model_type]))


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500.0, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_theta": 500.0, **LINEAR}},
        {"rope_theta": 500.0, "rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 500.0, **LINEAR}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": LINEAR},
        {"rope_parameters": {"rope_theta": 500.0, **LINEAR}, "rope_scaling": {"rope_theta": 500.0, **LINEAR}},
    ],
)
def test_both_forms_of_rotary_settings_may_agree(config):
    rotary = read("llama", **config).rotary
    assert (rotary.base, rotary.scaling, rotary.factor) == (500.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_theta": 500.0, "rope_type": "default"}, LINEAR),
        ({"rope_theta": 500.0, **LINEAR}, LINEAR | {"factor": 4.0}),
        ({"rope_theta": 500.0, **LINEAR}, LINEAR | {"rope_theta": 600.0}),
    ],
)
def test_forms_of_rotary_settings_that_differ_are_refused(parameters, scaling):
    with pytest.raises(UserError, match="rope_scaling=.* differs from rope_parameters=.*: delete one"):
        read("llama", rope_parameters=parameters, rope_scaling=scaling)


SCALINGS = [
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, **LINEAR},
    {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 30.0},
    {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    | {"attention_factor": 1.2},
]


@pytest.mark.parametrize("parameters", SCALINGS)
@pytest.mark.parametrize("model_type", OTHERS)
def test_exported_fields_are_equal_for_every_version_of_transformers(model_type, parameters):
    """`rope_parameters` of transformers 5 and the fields that earlier versions read describe the same rotation."""
    given = OTHERS[model_type]
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"} or None
    cfg = read(model_type, **given, rope_theta=parameters["rope_theta"], rope_scaling=scaling)
    fields = hf.ARCHITECTURES[model_type].config(cfg)
    names = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
    older = {name: fields[name] for name in names if name in fields}
    for config in (older, older | {"rope_parameters": fields["rope_parameters"]}):
        assert read(model_type, **given | config).rotary == cfg.rotary
    assert cfg.rotary.base == parameters["rope_theta"]
    assert cfg.rotary.scaling == parameters.get("rope_type", "none")


@pytest.mark.parametrize("rope", [{"attn_factor": 0.878, **LINEAR}, {"factr": 4.0, **LINEAR}])
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_rotary_settings_that_transformers_does_not_read_are_refused(form, rope):
    with pytest.raises(UserError, match="the rotary setting (attn_factor=0.878|factr=4.0) is not supported: delete"):
        read("llama", rope_theta=500.0, **{form: rope})


FULL = {"full_attention": {"rope_type": "default", "rope_theta": 500.0}}


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ({"rope_parameters": FULL | {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}}, 7.0),
        ({"rope_parameters": FULL | {"sliding_attention": {"rope_type": "default"}}}, 10_000.0),
        ({"rope_parameters": FULL | {"sliding_attention": {}}, "rope_local_base_freq": 77.0}, 77.0),
        ({"rope_parameters": FULL, "rope_local_base_freq": 77.0}, 77.0),
        ({"rope_theta": 500.0, "rope_local_base_freq": 77.0}, 77.0),
        ({"rope_theta": 500.0}, 10_000.0),
    ],
)
def test_the_base_of_windows(config, base):
    rotary = read("gemma3_text", **GEMMA, **config).rotary
    assert (rotary.base, rotary.window_base) == (500.0, base)
    alone = read("gemma3_text", **GEMMA, **config, layer_types=["sliding_attention"] * 2).rotary
    assert (alone.base, alone.window_base) == (base, None)
