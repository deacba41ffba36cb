"""The architectures of configs/tutorials.py against float64 models, and the mask of one of them by its definition."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests import oracles
from tests.helpers import TINY, apply, assert_close, build, tiny, with_own_stacks
from tests.models.test_models import REAL, SOURCE, TOKENS
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import ModelConfig
from tformer_jax.models import conversions
from tformer_jax.special_tokens import PAD

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tutorials.py"


def shrunk(variant: str) -> ModelConfig:
    """Returns a tutorial's architecture with tiny sizes; only stacks of different depths keep theirs."""
    cfg = read_config(f"{CONFIG}:{variant}").model
    sizes = TINY | {"source_vocab_size": 11 if cfg.family == "seq2seq" else None}
    if variant == "rmsnorm":
        sizes |= {"encoder_layers": 2, "decoder_layers": 3}
    if cfg.attention == "basic":
        sizes["num_heads"] = 1
    sizes = with_own_stacks(cfg.family, sizes)
    return dataclasses.replace(cfg, **sizes, num_classes=3 if cfg.family == "classifier" else None)


@pytest.mark.parametrize("variant", ["gpt", "basic_attention", "classifier", "rmsnorm", "transformer", "pre_norm"])
def test_the_architecture_of_a_tutorial_equals_the_formulas(variant):
    cfg = shrunk(variant)
    model, params = build(cfg)
    exact = oracles.f64(conversions.convert_projections(params, cfg, "separate"))
    if cfg.family == "seq2seq":
        actual = apply(model, params, SOURCE, TOKENS, source_padding_mask=SOURCE != PAD, target_padding_mask=REAL)[REAL]
        expected = oracles.seq2seq(exact, cfg, SOURCE, TOKENS, SOURCE != PAD, REAL)[REAL]
    else:
        actual = apply(model, params, TOKENS, padding_mask=REAL)
        expected = getattr(oracles, cfg.family)(exact, cfg, TOKENS, REAL)
        if cfg.family == "decoder_lm":
            actual, expected = actual[REAL], expected[REAL]
    assert_close(actual, expected, proves=(f"tutorials.py:{variant}", "NumPy float64, whole model"))


@pytest.mark.parametrize("hidden", [1, 4])
def test_lookahead_hides_the_last_tokens(hidden):
    """Token j of n is hidden from token i if n - j + i <= m: its embedding does not change the output for i."""
    n = 5
    model, params = build(tiny("masked_lm", lookahead=n - 1 - hidden))
    rows = np.tile(np.array([5, 6, 7, 8, 9], np.int32), (n + 1, 1))
    rows[np.arange(n), np.arange(n)] = 10  # row j has another token j; the last row has none
    logits = apply(model, params, rows)
    changed = np.abs(logits[:n] - logits[n]).max(axis=-1) > 1e-6
    np.testing.assert_array_equal(changed, [[n - j + i > hidden for i in range(n)] for j in range(n)])
