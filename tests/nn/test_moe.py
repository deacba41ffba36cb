"""Mixtures of experts against a loop over tokens and experts, and their losses against hand arithmetic."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, assert_close, init_module, normal, rest_slow, tiny
from tformer_jax import axes
from tformer_jax.nn import moe
from tformer_jax.nn.ffn import make_ffn

B, T, E = 2, 7, 4
REAL = np.arange(T) < np.array([[T], [4]])


def mixture(**changes):
    moe = {"num_experts": E, **changes.pop("moe", {})}
    return make_ffn(tiny("decoder_lm", **{"ffn": "moe", "moe": moe, "activation": "silu"} | changes))


@functools.cache
def compiled(module, train):
    def apply(params, x, real, segments):
        return module.apply({"params": params}, x, real, segments=segments, train=train)

    return jax.jit(apply)


def run(module, params, x, real=None, *, train=True, segments=None):
    return compiled(module, train)(params, x, real, segments)


CHANGES = [
    {},
    {"moe": {"experts_per_token": 1, "router_normalize": False}},
    {"moe": {"experts_per_token": 3, "expert_gated": False}, "activation": "relu"},
    {"moe": {"expert_capacity": 0.7, "experts_per_token": 1}},
    {"moe": {"shared_dim": 5, "shared_gate": True}},
    {"moe": {"shared_dim": 7, "expert_gated": False, "expert_capacity": 0.5}, "activation": "relu"},
    {"ffn_bias": False, "moe": {"expert_capacity": 0.5}},
    {"moe": {"experts_per_token": 4, "expert_capacity": 1.0}},
]


@pytest.mark.parametrize("changes", rest_slow(CHANGES, 6), ids=str)
def test_equals_the_dense_loop(changes):
    module = mixture(**changes)
    x = normal(B, T, 8)
    params = init_module(module, x)
    expected = oracles.mixture(oracles.f64(params), np.float64(x), module.cfg, REAL, train=True)
    capacity = "limited" if module.cfg.moe.expert_capacity else "free"
    shared = ", a shared expert" if module.cfg.moe.shared_dim else ""
    proves = (f"ffn=moe, {capacity} capacity{shared}", "NumPy float64")
    assert_close(run(module, params, x, REAL), expected, proves=proves)


@pytest.mark.long
def test_capacity_drops_tokens():
    x = normal(B, T, 8)
    free, tight = mixture(), mixture(moe={"expert_capacity": 0.25})
    params = init_module(free, x)
    assert np.abs(run(free, params, x) - run(tight, params, x)).max() > 1e-3


def test_nothing_is_dropped_in_inference():
    x = normal(B, T, 8)
    free, tight = mixture(), mixture(moe={"expert_capacity": 0.25})
    params = init_module(free, x)
    np.testing.assert_array_equal(run(tight, params, x, train=False), run(free, params, x))


def test_rows_do_not_depend_on_each_other():
    module, x = mixture(moe={"expert_capacity": 0.5}), normal(B, T, 8)
    params = init_module(module, x)
    assert_close(run(module, params, x)[:1], run(module, params, x.at[1].set(9.0))[:1], 1e-6)


@pytest.mark.long
def test_tokens_do_not_depend_on_later_tokens():
    """Regression test: a later token displaced the second choice of an earlier one."""
    module, x = mixture(moe={"expert_capacity": 0.5}), normal(1, 40, 8)
    params = init_module(module, x)
    full = run(module, params, x)
    for T in (1, 7, 23):
        assert_close(run(module, params, x[:, :T]), full[:, :T], 1e-6)


def test_an_expert_reads_its_share_of_the_tokens_so_far():
    """Every token chooses expert 0 of 4: with capacity factor 0.5, it reads tokens 1, 9 and 17."""
    cfg = mixture(moe={"expert_capacity": 0.5, "experts_per_token": 1, "router_normalize": False}).cfg
    logits = np.tile(np.float32([1, 0, 0, 0]), (1, 20, 1))
    weights = jax.jit(lambda *arrays: moe.route(*arrays, cfg, limited=True).weights)(logits, np.ones((1, 20), bool))
    np.testing.assert_array_equal(np.flatnonzero(weights[0, :, 0]) + 1, [1, 9, 17])


def test_capacities_are_those_of_the_decimal_factor():
    """Regression test: 1.1 * 2 * 200 / 8 was 55.000000000000007, and its ceiling 56."""
    cfg = mixture(moe={"expert_capacity": 1.1, "experts_per_token": 2, "num_experts": 8}).cfg
    assert moe.capacity(cfg, 201)[[0, 1, 3, 200, 201]].tolist() == [0, 1, 1, 55, 56]


@pytest.mark.long
def test_packed_documents_have_separate_capacities():
    module, x = mixture(moe={"expert_capacity": 0.5}), normal(1, 20, 8)
    params = init_module(module, x)
    lengths = np.array([7, 3, 7, 3])
    packed = run(module, params, x, segments=jnp.asarray(np.repeat([4, 2, 7, 1], lengths))[None])
    alone = [run(module, params, part) for part in np.split(x, np.cumsum(lengths)[:-1], axis=1)]
    assert_close(packed, np.concatenate(alone, axis=1), 1e-6)
    assert np.abs(packed - run(module, params, x, segments=jnp.ones((1, 20), int))).max() > 1e-3


@pytest.mark.long
def test_capacities_of_documents_in_a_long_row():
    """Regression test: from token 32,537 of a row of 33,000 on, 32-bit sums overflowed."""
    cfg = mixture(moe={"expert_capacity": 0.9, "experts_per_token": 1}).cfg
    documents, length = 330, 100
    logits = np.tile(np.asarray(normal(1, length, E)), (1, documents, 1))
    segments = np.repeat(np.arange(documents), length)[None]
    weights = moe.route(logits, np.ones(segments.shape, bool), cfg, segments=segments, limited=True).weights
    weights = np.asarray(weights).reshape(documents, length)
    assert 0 < (weights[0] == 0).sum() < length
    np.testing.assert_array_equal(weights, np.broadcast_to(weights[0], weights.shape))


@pytest.mark.long
@pytest.mark.parametrize("real", rest_slow(["x..x.xx", "..xxxxx", "xxxxx.."], 1))
def test_padding_takes_no_capacity_and_gets_zeros(real):
    module, x = mixture(moe={"expert_capacity": 0.5}), normal(1, T, 8)
    params = init_module(module, x)
    real = np.array([[character == "x" for character in real]])
    out = run(module, params, x, real)
    np.testing.assert_array_equal(out, run(module, params, jnp.where(real[..., None], x, 9.0), real))
    np.testing.assert_array_equal(out[~real], 0)
    assert_close(out[real], run(module, params, x[:, real[0]])[0], 1e-6)


def test_all_experts_on_every_token_is_a_weighted_sum():
    module, x = mixture(moe={"experts_per_token": E}), normal(1, 3, 8)
    params = init_module(module, x)
    p, x64 = oracles.f64(params), np.float64(x)
    weights = oracles.softmax(x64 @ p["router"])
    expected = sum(weights[..., e, None] * oracles.expert_ffn(p, e, x64, module.cfg) for e in range(E))
    assert_close(run(module, params, x), expected)


def test_balance_loss_by_hand():
    # two experts, probabilities 3/4 and 1/4 for each token, all choices on expert 0: 2 * (1 * 3/4 + 0 * 1/4)
    loss = jax.jit(moe.balance_loss)
    logits = np.tile(np.log(np.float32([3, 1])), (1, 4, 1))
    assert_close(loss(logits, np.zeros((1, 4, 1), np.int32), np.ones((1, 4), bool)), 1.5, 1e-6)
    even = np.int32([0, 1, 0, 1])[None, :, None]
    assert_close(loss(np.zeros_like(logits), even, np.ones((1, 4), bool)), 1.0, 1e-6)


def test_router_z_loss_by_hand():
    logits = np.float32([[[0, 0], [5, 5]]])
    assert_close(jax.jit(moe.router_z_loss)(logits, np.array([[True, False]])), math.log(2) ** 2, 1e-6)


def test_losses_are_weighted_and_count_real_tokens_only():
    module, x = mixture(moe={"balance_loss": 0.5, "router_z_loss": 0.25}), normal(B, T, 8)
    params = init_module(module, x)
    _, collected = apply(module, params, x, REAL, mutable=["losses"])
    logits = np.float64(x) @ np.float64(params["router"])
    z = np.log(np.exp(logits).sum(-1))[REAL]
    assert_close(collected["losses"]["router_z"][0], 0.25 * (z**2).mean())
    probabilities = oracles.softmax(logits)[REAL]
    chosen = np.argsort(-probabilities, axis=-1)[:, :2]
    share = np.bincount(chosen.ravel(), minlength=E) / chosen.size
    assert_close(collected["losses"]["balance"][0], 0.5 * E * (share * probabilities.mean(0)).sum())


def test_the_router_learns_from_the_losses():
    module, x = mixture(moe={"balance_loss": 1.0}), normal(B, T, 8)
    params = init_module(module, x)

    def balance(params):
        return module.apply({"params": params}, x, mutable=["losses"])[1]["losses"]["balance"][0]

    assert np.abs(jax.jit(jax.grad(balance))(params)["router"]).max() > 1e-4


def test_kernels_have_axis_names_and_the_last_one_is_scaled_down():
    module = mixture(initializer="normal", init_std=0.1, scale_residual_init=True, decoder_layers=8, ffn_dim=64, dim=64)
    boxed = jax.jit(module.init)(jax.random.key(0), normal(1, 2, 64), None)["params"]
    kernels = {name: box for name, box in boxed.items() if name.endswith("_kernel")}
    for name, box in kernels.items():
        ends = name == "contract_kernel"
        assert box.names == ((axes.EXPERTS, axes.MLP, axes.EMBED) if ends else (axes.EXPERTS, axes.EMBED, axes.MLP))
        assert abs(np.std(box.value) / (0.1 / 4 if ends else 0.1) - 1) < 0.05, name
    assert len(kernels) == 3


@pytest.mark.long
def test_gradients_of_biases_are_summed_in_float32():
    """Regression test: sums in bfloat16 end at 256. The weights of both experts add up to 1 for each of 600 tokens."""
    module, x = mixture(dtype="bfloat16", moe={"num_experts": 2}), jnp.ones((1, 600, 8))
    params = init_module(module, x)
    grads = jax.grad(lambda params: apply(module, params, x, train=True).astype(jnp.float32).sum())(params)
    assert_close(np.asarray(grads["contract_bias"]).sum(0), np.full(8, 600), 0.01)
