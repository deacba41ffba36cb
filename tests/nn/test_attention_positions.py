"""Positions in attention: rotary, ALiBi and T5's relative buckets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import position_oracles
from tests.helpers import assert_close, init_module, normal, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.nn import attention_positions

ROTARY = {
    "halves": {},
    "interleaved": {"pairing": "interleaved"},
    "base 500": {"base": 500.0},
    "linear": {"scaling": "linear", "factor": 4.0},
    "llama3": {"scaling": "llama3", "factor": 8.0, "original_length": 60},
    "yarn": {"scaling": "yarn", "factor": 8.0, "original_length": 60, "base": 5.0},
    "yarn, other ends and factor": {
        "scaling": "yarn",
        "factor": 4.0,
        "original_length": 400,
        "base": 50.0,
        "beta_fast": 9.0,
        "beta_slow": 2.0,
        "attention_factor": 0.7,
        "fraction": 0.7,
        "pairing": "interleaved",
    },
    "the first half": {"fraction": 0.5},
    "the first third, interleaved": {"fraction": 0.34, "pairing": "interleaved"},
}


@functools.partial(jax.jit, static_argnames=("cfg", "window"))
def rotated(cfg, x, positions, *, window: bool = False):
    module = attention_positions.make_attention_positions(cfg, bidirectional=False)
    return module.apply({}, positions, window=window).rotation(x)


@pytest.mark.parametrize("changes", ROTARY.values(), ids=ROTARY)
def test_rotary_equals_the_formula(changes):
    cfg = tiny("decoder_lm", position="rotary", head_dim=12, rotary=changes)
    x = normal(2, 40, 3, 12)
    out = rotated(cfg, x, np.arange(40)[None])
    (name,) = (name for name, value in ROTARY.items() if value == changes)
    assert_close(
        out, position_oracles.rotate(np.float64(x), cfg), proves=(f"position=rotary ({name})", "NumPy float64")
    )


def test_llama3_scales_by_frequency():
    cfg = tiny("decoder_lm", position="rotary", head_dim=12, rotary=ROTARY["llama3"])
    plain = np.array(position_oracles.rotary_frequencies(tiny("decoder_lm", position="rotary", head_dim=12)))
    ratio = attention_positions.rotary_frequencies(cfg, window=False) / plain
    assert ratio[0] == 1
    assert 1 / 8 < ratio[1] < 1
    np.testing.assert_allclose(ratio[2:], 1 / 8)


def test_yarn_scales_slow_pairs_only():
    """Pairs 0, ..., 5 make 63.7, 20.1, 6.4, 2.0, 0.64 and 0.20 rotations in 400 tokens; the ramp is from 1 to 4."""
    rotary = {"scaling": "yarn", "factor": 8.0, "original_length": 400, "base": 1000.0, "beta_fast": 16.0}
    cfg = tiny("decoder_lm", position="rotary", head_dim=12, rotary=rotary)
    ratio = attention_positions.rotary_frequencies(cfg, window=False) * 1000 ** (np.arange(0, 12, 2) / 12)
    np.testing.assert_allclose(ratio, [1, 1, 2 / 3 + 1 / 24, 1 / 3 + 1 / 12, 1 / 8, 1 / 8])


@pytest.mark.parametrize(
    ("rotary", "shares"),
    [
        # all pairs make less than one rotation in 6 tokens: both ends of the ramp are 0
        ({"original_length": 6, "base": 5.0}, [1, 0, 0, 0, 0, 0]),
        # index 0.5 makes 139 rotations in 1,000 tokens, index 18.9 makes one: the ramp is from 0 to R - 1
        ({"original_length": 1000, "base": 5.0, "beta_fast": 139.0}, [1, 10 / 11, 9 / 11, 8 / 11, 7 / 11, 6 / 11]),
    ],
)
def test_the_ends_of_the_yarn_ramp(rotary, shares):
    cfg = tiny("decoder_lm", position="rotary", head_dim=12, rotary={"scaling": "yarn", "factor": 8.0, **rotary})
    ratio = attention_positions.rotary_frequencies(cfg, window=False) * 5 ** (np.arange(0, 12, 2) / 12)
    np.testing.assert_allclose(ratio, [share + (1 - share) / 8 for share in shares])


def test_features_outside_of_the_fraction_are_unchanged():
    cfg = tiny("decoder_lm", position="rotary", head_dim=8, rotary={"fraction": 0.25})
    x = normal(1, 5, 2, 8)
    out = rotated(cfg, x, np.arange(5)[None])
    np.testing.assert_array_equal(out[..., 2:], x[..., 2:])
    assert np.abs(out[..., :2] - x[..., :2]).max() > 0.1


def test_window_layers_have_their_own_unscaled_base():
    rotary = {"window_base": 100.0, **ROTARY["linear"]}
    cfg = tiny(
        "decoder_lm",
        position="rotary",
        head_dim=8,
        decoder_layers=2,
        rotary=rotary,
        layer_pattern=("window", "full"),
        window=1,
    )
    x = normal(1, 6, 2, 8)
    for kind in ("window", "full"):
        out = rotated(cfg, x, np.arange(6)[None], window=kind == "window")
        assert_close(
            out, position_oracles.rotate(np.float64(x), cfg, kind), proves=("rotary.window_base", "NumPy float64")
        )


@settings(max_examples=30)
@given(
    q=st.integers(0, 60),
    k=st.integers(0, 60),
    shift=st.integers(0, 300),
    pairing=st.sampled_from(["halves", "interleaved"]),
)
def test_scores_depend_only_on_the_distance(q, k, shift, pairing):
    cfg = tiny("decoder_lm", position="rotary", head_dim=8, rotary={"pairing": pairing})
    query, key = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(q, k):
        return float((np.float64(rotated(cfg, query, np.array([[q]]))) * rotated(cfg, key, np.array([[k]]))).sum())

    assert abs(score(q, k) - score(q + shift, k + shift)) < 2e-4


def test_rotation_keeps_lengths():
    cfg = tiny("decoder_lm", position="rotary", head_dim=8)
    x = normal(1, 50, 1, 8)
    out = rotated(cfg, x, np.arange(50)[None])
    assert_close(np.linalg.norm(out, axis=-1), np.linalg.norm(x, axis=-1))


def test_rotary_needs_even_head_sizes():
    with pytest.raises(UserError, match="model.position='rotary': rotates pairs of features; the head size 3 must be"):
        tiny("decoder_lm", position="rotary", head_dim=3)


def test_a_fraction_must_be_of_whole_pairs():
    with pytest.raises(UserError, match="model.rotary.fraction=0.4: rotates 3 of 8 features, which must be pairs"):
        tiny("decoder_lm", position="rotary", head_dim=8, rotary={"fraction": 0.4})


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (2, [1 / 16, 1 / 256]),
        # the slopes of 4 heads, then every other one of 8 heads
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
    ],
)
def test_alibi_slopes_by_hand(heads, expected):
    np.testing.assert_allclose(attention_positions.alibi_slopes(heads), expected, rtol=1e-12)


def test_alibi_bias():
    module = attention_positions.make_attention_positions(tiny("decoder_lm", position="alibi"), bidirectional=True)
    bias = module.apply({}, jnp.arange(5)[None], window=False).bias
    out = bias.block(jnp.arange(5), jnp.arange(7))
    assert_close(out, position_oracles.alibi_bias(4, 5, 7), 1e-6, proves=("position=alibi", "NumPy float64"))


def buckets(offsets: np.ndarray, count: int, farthest: int, bidirectional: bool) -> np.ndarray:
    each = functools.partial(attention_positions.relative_bucket, bidirectional=bidirectional)
    return np.asarray(jax.jit(each, static_argnums=(1, 2))(offsets, count, farthest))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_the_formula(bidirectional):
    offsets = np.arange(-300, 301)
    out = buckets(offsets, 32, 128, bidirectional)
    expected = [position_oracles.relative_bucket(int(offset), 32, 128, bidirectional) for offset in offsets]
    np.testing.assert_array_equal(out, expected)
    assert out.min() == 0
    assert out.max() == 31


def test_boundaries_of_buckets_are_exact():
    """2 * (200 / 2) ** (1 / 2) = 20; regression test: the float32 logarithm was just below."""
    np.testing.assert_array_equal(buckets(np.array([-19, -20]), 4, 200, False), [2, 3])
    np.testing.assert_array_equal(buckets(np.array([-19, -20, 19, 20]), 8, 200, True), [2, 3, 6, 7])


def test_buckets_by_hand():
    # 8 buckets, one direction: 0..3 have their own, then 4 * 4^(i/4) up to 16: [4, 5], [6, 7], [8, 11], [12, ...)
    distances = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 99])
    np.testing.assert_array_equal(buckets(-distances, 8, 16, False), [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7])
    assert buckets(np.array(5), 8, 16, False) == 0
    assert buckets(np.array(1), 8, 16, True) == 5


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias(bidirectional):
    cfg = tiny("decoder_lm", position="relative", relative={"buckets": 8, "distance": 16})
    module = attention_positions.make_attention_positions(cfg, bidirectional=bidirectional)
    params = init_module(module, jnp.arange(5)[None], window=False)
    bias = jax.jit(lambda: module.apply({"params": params}, jnp.arange(5)[None], window=False).bias)()
    expected = position_oracles.relative_bias(np.float64(params["embedding"]), 5, 9, 16, bidirectional)
    proves = (f"position=relative, {'both directions' if bidirectional else 'causal'}", "NumPy float64")
    assert_close(bias.block(jnp.arange(5), jnp.arange(9)), expected, 1e-6, proves=proves)
