"""The gated delta rule against its recurrence in float64; `models/test_cache.py` compares decoding with a full pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, assert_close, build, init_module, normal, rest_slow, tiny
from tformer_jax import axes
from tformer_jax.models import conversions
from tformer_jax.nn import delta_rule
from tformer_jax.nn.gated_delta import ConvolvedHeads, DeltaState, GatedDelta
from tformer_jax.nn.slots import BeamAncestry

B, T, N, H, V, D = 2, 11, 3, 4, 5, 8
SEGMENTS = np.repeat([[1, 2, 3], [1, 4, 5]], [4, 1, 6], axis=1)


@functools.cache
def inputs():
    """Returns the arguments of `delta_rule.full_pass`, without segments."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, T, N, size)) for size in (H, H, V))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, beta = -rng.uniform(0, 2, (B, T, N)), rng.uniform(0, 1, (B, T, N))
    log_decay[0, 3:5] = beta[0, 3:5] = 0
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta, rng.normal(size=(B, N, H, V))))


EVERY = slice(None)


def recurrence(rows=EVERY, start=True):
    """Returns the outputs and last states of the tokens `rows` by the oracle."""
    *tokens, state = map(np.float64, inputs())
    out, last = np.zeros((B, T, N, V))[:, rows], np.zeros((B, N, H, V))
    for b, n in np.ndindex(B, N):
        actual = oracles.delta_rule(*(x[b, rows, n] for x in tokens), state[b, n].T if start else None)
        out[b, :, n], last[b, n] = actual[0], actual[1].T
    return out, last


@pytest.mark.parametrize("chunk", rest_slow([4, 64, 1], 2))
def test_chunks_equal_the_recurrence(chunk, monkeypatch):
    monkeypatch.setattr(delta_rule, "CHUNK", chunk)
    out = jax.jit(lambda *tokens: delta_rule.full_pass(*tokens))(*inputs())
    for actual, expected in zip(out, recurrence(), strict=True):
        assert_close(actual, expected, proves=("attention=gated_delta, chunks", "recurrence in NumPy float64"))


def test_chunks_are_exact_after_strong_decays():
    """Regression test: a decay was the difference of two cumulative sums, which a reset within the chunk made large."""
    q, k, v, _, beta, state = inputs()
    log_decay = jnp.where(jnp.arange(T)[:, None] % 2 == 0, -1000.0, -0.05) * jnp.ones((B, T, N))
    actual, last = jax.jit(delta_rule.full_pass)(q, k, v, log_decay, beta, state)
    for b, n in np.ndindex(B, N):
        tokens = (np.float64(x[b, :, n]) for x in (q, k, v, log_decay, beta))
        expected, expected_last = oracles.delta_rule(*tokens, np.float64(state[b, n]).T)
        np.testing.assert_allclose(actual[b, :, n], expected, atol=3e-6)
        np.testing.assert_allclose(last[b, n], expected_last.T, atol=3e-6)


KEYS = {
    "equal": np.ones((64, H)),
    "alternating": np.ones((64, H)) * (-1.0) ** np.arange(64)[:, None],
    "similar": 1 + 0.1 * np.random.default_rng(0).normal(size=(64, H)),
    "a walk": np.random.default_rng(0).normal(size=(64, H)).cumsum(axis=0),
    "random": np.random.default_rng(0).normal(size=(64, H)),
}


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("length", [64, 37])
@pytest.mark.parametrize("keys", KEYS)
def test_systems_of_similar_keys_are_solved_in_float32(keys, length, resets):
    """Powers of the system of equal keys have entries up to 10^18; `(I - L)(I + L^2)...` has an error of 10^9."""
    k = KEYS[keys][:length] / np.linalg.norm(KEYS[keys][:length], axis=1, keepdims=True)
    log_decay = np.where(np.arange(length) % 7 == 3, -1000.0 if resets else 0.0, -1e-3)
    q, v = (np.random.default_rng(seed).normal(size=(length, size)) for seed, size in ((1, H), (2, V)))
    tokens = [np.float32(x) for x in (q, k, v, log_decay, np.ones(length))]
    out, last = jax.jit(delta_rule.full_pass)(*(x[None, :, None] for x in tokens), np.zeros((1, 1, H, V), np.float32))
    expected, expected_last = oracles.delta_rule(*map(np.float64, tokens), np.zeros((V, H)))
    np.testing.assert_allclose(out[0, :, 0], expected, atol=1e-5)
    np.testing.assert_allclose(last[0, 0], expected_last.T, atol=1e-5)


def test_steps_equal_the_recurrence():
    *tokens, state = inputs()
    step, outputs = jax.jit(delta_rule.step), []
    for t in range(T):
        out, state = step(*(x[:, t] for x in tokens), state)
        outputs.append(out)
    for actual, expected in zip((np.stack(outputs, axis=1), state), recurrence(), strict=True):
        assert_close(actual, expected, proves=("attention=gated_delta, steps", "recurrence in NumPy float64"))


@pytest.mark.parametrize("chunk", [4, 64])
def test_segments_start_without_a_state(chunk, monkeypatch):
    monkeypatch.setattr(delta_rule, "CHUNK", chunk)
    out, last = jax.jit(lambda *tokens: delta_rule.full_pass(*tokens))(*inputs(), SEGMENTS)
    parts = [recurrence(rows, start) for rows, start in ((slice(4), True), (slice(4, 5), False), (slice(5, T), False))]
    assert_close(out, np.concatenate([part for part, _ in parts], axis=1))
    assert_close(last, parts[-1][1])


@pytest.mark.long
def test_gradients_equal_those_of_steps(monkeypatch):
    monkeypatch.setattr(delta_rule, "CHUNK", 4)
    weights = normal(B, T, N, V, seed=5)

    def by_steps(*inputs):
        *tokens, state = inputs
        total = 0.0
        for t in range(T):
            out, state = delta_rule.step(*(x[:, t] for x in tokens), state)
            total += (out * weights[:, t]).sum()
        return total + (state**2).sum()

    def by_chunks(*inputs):
        out, state = delta_rule.full_pass(*inputs)
        return (out * weights).sum() + (state**2).sum()

    every = tuple(range(6))
    for actual, expected in zip(
        jax.jit(jax.grad(by_chunks, every))(*inputs()), jax.jit(jax.grad(by_steps, every))(*inputs()), strict=True
    ):
        assert_close(actual, expected, 1e-4)


@functools.cache
def layer():
    cfg = tiny(
        "decoder_lm", attention="gated_delta", gated_delta={"num_key_heads": 2, "key_head_dim": 3, "value_head_dim": 5}
    )
    module = GatedDelta(cfg)
    return cfg, module, init_module(module, normal(B, T, D))


@pytest.mark.long
def test_the_layer_equals_the_formula():
    cfg, module, params = layer()
    x = normal(B, T, D, seed=3)
    out, _ = apply(module, params, x)
    expected = oracles.gated_delta(oracles.f64(params), np.float64(x), cfg)
    assert_close(out, expected, proves=("attention=gated_delta", "NumPy float64"))


def test_the_output_kernel_ends_a_sublayer():
    """Of four sub-layers, each starts with half of the plain kernel."""
    plain, scaled = (
        GatedDelta(tiny("decoder_lm", attention="gated_delta", decoder_layers=2, scale_residual_init=scale))
        for scale in (False, True)
    )
    x, key = normal(1, 1, D), jax.random.key(0)
    first, second = (
        jax.jit(lambda module=module: module.init(key, x)["params"]["output"]["kernel"].value)()
        for module in (plain, scaled)
    )
    assert_close(second, first / 2)


@pytest.mark.long
def test_padding_leaves_the_state_untouched():
    cfg, module, params = layer()
    x, garbage = normal(B, 4, D, seed=3), 100 * normal(B, 7, D, seed=4)
    real = np.array([[0, 0, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 1, 0]], bool)
    padded = np.array(garbage)
    padded[real] = np.asarray(x).reshape(-1, D)
    empty = DeltaState.empty(cfg, B, 2)

    @jax.jit
    def run(x, real, cache):
        return module.apply({"params": params}, x, padding_mask=real, cache=cache)

    alone, expected = run(np.concatenate([x, garbage[:, :3]], axis=1), np.arange(7) < np.full((B, 1), 4), empty)
    out, state = run(padded, real, empty)
    plain = oracles.gated_delta(oracles.f64(params), np.float64(x), cfg)
    assert_close(out[real].reshape(x.shape), plain)
    assert_close(alone[:, :4], plain)
    jax.tree.map(assert_close, state, expected)
    _, same = run(padded, np.zeros_like(real), expected)
    jax.tree.map(np.testing.assert_array_equal, same, expected)


def test_beams_continue_the_states_of_their_parents():
    cfg, module, params = layer()
    first, second, third = (normal(1, 2, D, seed=seed) for seed in (1, 2, 3))

    @jax.jit
    def step(x, cache, parents):
        return module.apply({"params": params}, x, cache=cache, parents=parents)

    _, state = step(first, DeltaState.empty(cfg, 1, 2), np.array([[0, 0]]))
    _, state = step(second, state, np.array([[0, 1]]))
    out, _ = step(third, state, np.array([[1, 1]]))
    for beam in range(2):
        row = np.concatenate([first[:, 1:], second[:, 1:], third[:, beam : beam + 1]], axis=1)
        assert_close(out[:, beam], oracles.gated_delta(oracles.f64(params), np.float64(row), cfg)[:, -1])


def test_parents_of_beams():
    """A prompt of 3 tokens; two beams of two tokens each, the second ones both from beam 1."""
    ancestry = BeamAncestry(np.array([[[1, 0, 0], [1, 1, 0]]]), np.array([3]))
    parents = [ancestry.parents(np.full((1, 2), position)) for position in (2, 3, 4, 5)]
    np.testing.assert_array_equal(parents, [[[0, 0]], [[0, 0]], [[1, 1]], [[0, 1]]])


def test_projections_of_other_layers_are_fused():
    """`test_cache` compares the logits."""
    cfg = tiny("decoder_lm", decoder_layers=2, layer_pattern=("gated_delta", "full"))
    _, params = build(cfg)
    fused, converted = conversions.fused(cfg, params)
    assert fused.attention_projections == "fused_qkv"
    layers = converted["decoder"]
    assert layers["layers_0"]["self_attention"].keys() == params["decoder"]["layers_0"]["self_attention"].keys()
    assert layers["layers_1"]["self_attention"].keys() == {"qkv", "output"}


def test_gradients_of_convolutions_are_summed_in_float32():
    """Regression test: each of the 1,024 tokens contributes SiLU'(0) = 1 / 2 times its projection, which is 1."""
    cfg = tiny("decoder_lm", attention="gated_delta", gated_delta={"conv_kernel_size": 1}, dtype="bfloat16")
    module = ConvolvedHeads(cfg, axes.HEADS, 1, 1)
    x = jnp.ones((32, 32, D), jnp.bfloat16)
    inputs = x, jnp.zeros((32, 1, 0, 1)), jnp.full(32, 32), None
    params = init_module(module, *inputs)
    params = {"conv_kernel": np.zeros((1, 1, 1)), "project": {"kernel": np.full((D, 1, 1), 1 / D)}}

    def total(params):
        return module.apply({"params": params}, *inputs)[0].astype(jnp.float32).sum()

    assert jax.jit(jax.grad(total))(params)["conv_kernel"] == 512
