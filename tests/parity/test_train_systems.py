"""The PyTorch models and optimizer of `benchmark.py train` train exactly as ours."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from tests.helpers import assert_close, randomized, tiny
from tformer_jax import presets
from tformer_jax.config import Config, DataConfig, TrainConfig
from tformer_jax.config.layers import RotaryConfig
from tformer_jax.lab.benchmarks import torch_models, train_cases
from tformer_jax.lab.benchmarks.torch_systems import PyTorch
from tformer_jax.lab.benchmarks.train_systems import Ours
from tformer_jax.models import conversions
from tformer_jax.special_tokens import IGNORED, PAD

STEPS = 6
GPT = {"position": "learned", "activation": "gelu", "attention_bias": (), "ffn_bias": False, "norm_bias": False}
QWEN3 = presets.LAYERS_OF_QWEN3 | {"head_dim": 4, "rotary": RotaryConfig(base=100.0)}
MODELS = {
    "GPT-2": ("decoder_lm", GPT | {"scale_embeddings": False}),
    "Qwen3, untied": ("decoder_lm", QWEN3 | {"num_kv_heads": 2, "tie_embeddings": "none"}),
    "Qwen3, translation": ("seq2seq", QWEN3 | {"attention_projections": "fused_qkv"}),
    "Transformer": ("seq2seq", {"tie_embeddings": "all", "decoder_layers": 2, "attention_scale": 0.7}),
    "post-norm": ("seq2seq", {"norm_placement": "post", "activation": "gelu_tanh"}),
}
SLOW = ("post-norm",)
"""No built-in case has these layers."""


def padded(batches):
    """Batches of a translation model whose second row has two source tokens and three target tokens."""

    def shortened(case, count):
        actual = [{key: array.copy() for key, array in batch.items()} for batch in batches(case, count)]
        for batch in actual:
            batch["source"][1, 2:], batch["target_in"][1, 3:], batch["target_out"][1, 3:] = PAD, PAD, IGNORED
        return actual

    return shortened


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MODELS])
def test_losses_and_gradients_are_equal(name, tmp_path, monkeypatch):
    """Six steps from random parameters, with effective weight decay and clipping; rows of translations are padded.

    The first moments after one step are the clipped gradients times `1 - optim.beta1`.
    """
    family, changes = MODELS[name]
    how = {"source": "stdlib_text", "batching": "windows"} if family == "decoder_lm" else {"batching": "packed"}
    data = DataConfig(batch_size=3, window=7, **how)
    case = train_cases.config_case(Config(model=tiny(family, **changes), data=data))
    optim = dataclasses.replace(case.cfg.optim, learning_rate=0.01, weight_decay=0.3, clip_norm=0.5)
    train = TrainConfig(label_smoothing=0.1)
    case = dataclasses.replace(case, cfg=dataclasses.replace(case.cfg, optim=optim, train=train))
    if family == "seq2seq":
        monkeypatch.setattr(train_cases.Case, "batches", padded(train_cases.Case.batches))
    assert train_cases.unsupported_settings(case.cfg) == []
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    ours = Ours(case)
    ours.state = ours.state.replace(params=randomized(ours.state.params))
    ours.save(tmp_path / "start.npz")
    theirs, autocast = (
        PyTorch(case.cfg, tmp_path / "start.npz", threads=1, compiled=False, backend="cpu", products=products)
        for products in ("float32", "bfloat16")
    )
    actual, expected = ours.steps(1)[1], theirs.steps(1)[1]
    assert 1e-6 < abs(autocast.steps(1)[1][0] / expected[0] - 1) < 3e-2
    assert_moments_are_equal(ours, theirs, case.cfg)
    actual, expected = actual + ours.steps(STEPS - 1)[1], expected + theirs.steps(STEPS - 1)[1]
    assert len(set(expected)) == STEPS
    assert_close(actual, expected, 1e-5)


def assert_moments_are_equal(ours, theirs, cfg):
    moments = conversions.convert_projections(optax.tree.get(ours.state.opt_state, "mu"), cfg.model, "separate")
    holder = torch_models.build(cfg)
    torch_models.load_params(holder, flatten_dict(jax.tree.map(np.array, moments), sep="/"))
    for (name, actual), parameter in zip(holder.named_parameters(), theirs._parameters, strict=True):
        expected = theirs._optimizer.state[parameter]["exp_avg"]
        scale = expected.abs().max()
        assert scale > 0, name
        assert_close(actual.detach() / scale, expected / scale, 2e-5)
