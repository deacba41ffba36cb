"""Rotary settings in the forms of transformers 4 and 5, and in both at once."""

from typing import Any

import numpy as np
import pytest

from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.interop import hf

SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def read(model_type: str, **config: Any) -> ModelConfig:
    arrays = {"lm_head.weight": np.ones(1)}
    return ModelConfig(**hf._settings({"model_type": model_type, **SIZES, **config}, arrays, hf.DECODERS[model_type]))


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
    with pytest.raises(ConfigError, match="rope_scaling=.* differs from rope_parameters=.*: delete one"):
        read("llama", rope_parameters=parameters, rope_scaling=scaling)


GEMMA = {"sliding_window": 5, "sliding_window_pattern": 2}
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
