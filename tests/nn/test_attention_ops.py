"""The attention core: every backend against a float64 loop, and rows that attend to nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests import oracles, position_oracles
from tests.helpers import apply, assert_close, normal, rest_slow, tiny
from tests.nn.test_masks import array, booleans, rising
from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds
from tformer_jax.nn import attention_ops
from tformer_jax.nn.attention import BasicAttention
from tformer_jax.nn.attention_ops import blockwise as blockwise_file
from tformer_jax.nn.attention_ops.blocks import block_size
from tformer_jax.nn.attention_ops.shards import LocalHeadsBias
from tformer_jax.nn.attention_positions import AlibiBias, BucketBias
from tformer_jax.nn.masks import Mask

B, T, S, N, H = 2, 5, 6, 4, 3
SMALL_BLOCKS = attention_ops.Backend(functools.partial(blockwise_file.blockwise, block=4), sinks=True)
compiled = jax.jit(attention_ops.attend, static_argnames=("softcap", "backend"))


@pytest.fixture(params=["auto", "reference", "xla", "blockwise", "small blocks"])
def backend(request, monkeypatch):
    """Every backend that runs on any device; blocks of 4 divide neither T nor S."""
    monkeypatch.setitem(kinds.BACKENDS, "small blocks", SMALL_BLOCKS)
    return request.param


def switch(backend: str) -> str:
    return f"attention_backend={backend.replace('small blocks', 'blockwise')}"


def inputs(K: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)


def random_mask(heads: int) -> jax.Array:
    """Masks in which some rows attend to nothing."""
    mask = np.random.default_rng(3).random((B, heads, T, S)) < 0.6
    mask[0, :, 1] = False
    return jnp.asarray(mask)


@pytest.mark.parametrize("K", rest_slow({"GQA": 2, "MQA": 1, "MHA": 4}, 1))
@pytest.mark.parametrize("heads", rest_slow({"mask a head": N, "unmasked": None, "shared mask": 1}, 2))
def test_equals_the_formula(backend, K, heads):
    q, k, v = inputs(K)
    mask = None if heads is None else random_mask(heads)
    expected_mask = None if mask is None else np.broadcast_to(mask, (B, N, T, S))
    expected = oracles.attention_core(*map(np.float64, (q, k, v)), expected_mask)
    out = compiled(q, k, v, mask, backend=backend)
    assert_close(out, expected, 1e-6, proves=(switch(backend), "NumPy float64"))


def test_hidden_rows_are_zero_in_value_and_gradient(backend):
    q, k, v = inputs(2)
    mask = jnp.ones((B, 1, T, S), bool).at[:, :, 2].set(False)

    def row_sum(q, k, v):
        return attention_ops.attend(q, k, v, mask, backend=backend)[:, 2].sum()

    value, grads = jax.jit(jax.value_and_grad(row_sum, argnums=(0, 1, 2)))(q, k, v)
    assert value == 0
    for grad in grads:
        np.testing.assert_array_equal(grad, 0)


def gradients(backend, qkv, mask, seed=4, **options):
    weights = normal(*qkv[0].shape, seed=seed)

    def total(*qkv):
        return (weights * attention_ops.attend(*qkv, mask, backend=backend, **options)).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*qkv)


@functools.cache
def reference_gradients(K: int):
    return gradients("reference", inputs(K), random_mask(1))


@pytest.mark.parametrize("K", rest_slow({"GQA": 2, "MQA": 1, "MHA": 4}, 2))
def test_gradients_equal_the_reference_and_are_finite_with_hidden_rows(backend, K):
    actual = gradients(backend, inputs(K), random_mask(1))
    for gradient, expected in zip(actual, reference_gradients(K), strict=True):
        proves = (f"{switch(backend)}, gradients", "reference backend")
        assert_close(gradient, expected, 1e-6, proves=proves)


def test_gradients_of_the_reference_equal_finite_differences():
    q, k, v = (np.float64(x) for x in inputs(2))
    mask, weights, step = np.broadcast_to(random_mask(1), (B, N, T, S)), np.float64(normal(B, T, N, H, seed=4)), 1e-5
    actual = reference_gradients(2)
    for place, index in [(0, (0, 0, 1, 2)), (0, (1, 3, 3, 0)), (1, (0, 2, 1, 1)), (2, (1, 5, 0, 2))]:
        sums = []
        for shift in (step, -step):
            moved = [q.copy(), k.copy(), v.copy()]
            moved[place][index] += shift
            sums.append((weights * oracles.attention_core(*moved, mask)).sum())
        assert_close(actual[place][index], (sums[0] - sums[1]) / (2 * step), 1e-5)


def test_nothing_to_attend_gives_zeros(backend):
    for T, S in ((0, 3), (2, 0)):
        q, k = jnp.ones((1, T, 2, 4)), jnp.ones((1, S, 2, 4))
        out = attention_ops.attend(q, k, k, Mask(causal=True), backend=backend)
        np.testing.assert_array_equal(out, np.zeros((1, T, 2, 4)))


def test_scale_by_hand(backend):
    # H = 4: both keys are unit vectors times 2 ln 3, the query sees logits ln 3 and 0, weights 3/4 and 1/4
    q = jnp.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    k = 2 * jnp.log(3.0) * jnp.eye(4)[:2].reshape(1, 2, 1, 4)
    v = jnp.array([[8.0, 0, 0, 0], [0, 8.0, 0, 0]]).reshape(1, 2, 1, 4)

    @jax.jit
    def both(q, k, v):
        return [attention_ops.attend(q, k, v, scale=scale, backend=backend).ravel() for scale in (None, 1.0)]

    out, doubled = both(q, k, v)
    np.testing.assert_allclose(out, [6, 2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(doubled, [7.2, 0.8, 0, 0], rtol=1e-6)


def test_softcap(backend):
    q, k, v = inputs(2)
    if backend == "xla":
        with pytest.raises(UserError, match="'xla' cannot cap scores .*; write one of auto, reference, blockwise"):
            attention_ops.attend(q, k, v, softcap=0.5, backend=backend)
        return
    expected = oracles.attention_core(*map(np.float64, (q, k, v)), softcap=0.5)
    out = compiled(q, k, v, softcap=0.5, backend=backend)
    assert_close(out, expected, 1e-6, proves=("attention_softcap", "NumPy float64"))


SINKS = jnp.array([-2.0, 0.5, 3.0, 60.0])
"""The last one hides all keys in float32."""


@pytest.mark.parametrize("masked", [False, True])
def test_sinks(backend, masked):
    (q, k, v), mask = inputs(2), random_mask(1) if masked else None
    if backend == "xla":
        with pytest.raises(UserError, match="'xla' cannot add sinks to the softmax .*; write one of auto, reference"):
            attention_ops.attend(q, k, v, mask, sinks=SINKS, backend=backend)
        return
    expected_mask = None if mask is None else np.broadcast_to(mask, (B, N, T, S))
    expected = oracles.attention_core(*map(np.float64, (q, k, v)), expected_mask, sinks=np.float64(SINKS))
    out = compiled(q, k, v, mask, sinks=SINKS, backend=backend)
    assert_close(out, expected, 1e-6, proves=("attention_sinks", "NumPy float64"))


@pytest.mark.parametrize("name", ["reference", "small blocks"])
def test_sinks_are_one_more_key_without_a_value(name, monkeypatch):
    """All gradients equal those of attention to another key, whose scores are the sinks."""
    monkeypatch.setitem(kinds.BACKENDS, "small blocks", SMALL_BLOCKS)
    (q, k, v), mask, weights = inputs(4), random_mask(1), normal(B, T, N, H, seed=4)

    def added(q, k, v, sinks):
        out = attention_ops.attend(q, k, v, mask, sinks=sinks, backend=name)
        return (weights * out).sum()

    def appended(q, k, v, sinks):
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / H**0.5
        scores = jnp.where(mask, scores, -jnp.inf)
        last = jnp.broadcast_to(sinks[:, None, None], (B, N, T, 1))
        shares = jax.nn.softmax(jnp.concatenate([scores, last], axis=-1), axis=-1)[..., :-1]
        return (weights * jnp.einsum("BNTS,BSNH->BTNH", shares, v)).sum()

    arguments = q, k, v, SINKS.at[3].set(1.0)
    actual, expected = (jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*arguments) for total in (added, appended))
    for gradient, wanted in zip(actual, expected, strict=True):
        assert_close(gradient, wanted, 1e-6, proves=("attention_sinks, gradients", "a key without a value"))
    assert np.abs(expected[3]).min() > 0.01


def test_biases(backend):
    q, k, v = inputs(2)
    alibi = AlibiBias(jnp.array([0.5, 0.25, 0.125, 2.0]))
    table = BucketBias(normal(8, N, seed=9), bidirectional=True, farthest=6)
    expected_alibi = np.array([[[-slope * abs(t - s) for s in range(S)] for t in range(T)] for slope in alibi.slopes])
    expected_table = position_oracles.relative_bias(np.float64(table.table), T, S, 6, bidirectional=True)
    for bias, expected_bias in ((alibi, expected_alibi), (table, expected_table)):
        expected = oracles.attention_core(*map(np.float64, (q, k, v)), bias=expected_bias)
        assert_close(compiled(q, k, v, bias=bias, backend=backend), expected, 1e-6)


def test_biases_are_not_rounded_to_the_dtype_of_the_queries(backend):
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(2))
    table = normal(8, N, seed=9)
    out, shifted = (
        compiled(q, k, v, bias=BucketBias(added, bidirectional=True, farthest=6), backend=backend)
        for added in (table, table + 100)
    )
    assert_close(np.float32(out), np.float32(shifted), 2e-2)


def test_hidden_keys_are_ignored_with_very_negative_logits(backend):
    q, k = jnp.ones((1, 1, 1, 1)), jnp.array([-1e6, 0.0]).reshape(1, 2, 1, 1)
    v = jnp.array([3.0, 5.0]).reshape(1, 2, 1, 1)
    mask = jnp.array([True, False]).reshape(1, 1, 1, 2)
    assert attention_ops.attend(q, k, v, mask, backend=backend).item() == 3


ALIBI = AlibiBias(jnp.array([1.0, 0.5, 0.25, 0.1]))
RULES = {
    "causal": (7, 7, 4, {"causal": True}, None, None),
    "causal window with bias and soft-cap, GQA": (5, 11, 2, {"causal": True, "window": 3}, ALIBI, 2.0),
    "window in both directions, MQA": (9, 10, 1, {"window": 4}, None, 2.0),
    "both directions with bias": (3, 13, 4, {}, ALIBI, None),
}


@functools.cache
def blockwise_and_reference(rule):
    """Compiles both backends' values and gradients for one kind of mask."""
    T, S, K, static, bias, softcap = RULES[rule]
    qkv = normal(2, T, 4, 3), normal(2, S, K, 3, seed=1), normal(2, S, K, 3, seed=2)
    scoring, weights = attention_ops.Scoring(0.5, softcap, 0.0), normal(2, T, 4, 3, seed=5)
    backends = {"blockwise": SMALL_BLOCKS.run, "reference": kinds.load(kinds.BACKENDS, "reference").run}

    def both(arrays):
        results = {}
        for name, run in backends.items():
            out, pull = jax.vjp(
                lambda q, k, v, run=run: run(attention_ops.Operands(q, k, v, Mask(**static, **arrays), scoring, bias)),
                *qkv,
            )
            results[name] = out, *pull(weights)
        return results

    return jax.jit(both)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=12)
@given(data=st.data())
def test_blockwise_equals_reference_for_ragged_sizes_and_every_mask(rule, data):
    T, S = RULES[rule][:2]
    arrays = {
        "padding_mask": data.draw(booleans((2, S))),
        "segments": (data.draw(rising((2, T))), data.draw(rising((2, S)))),
        "prefix": data.draw(array((2,), 0, S)),
        "positions": (data.draw(array((2, T), 0, S)), data.draw(array((2, S), -1, S))),
        "explicit": data.draw(booleans((2, 1, T, S))),
    }
    results = blockwise_and_reference(rule)(arrays)
    for name, actual, expected in zip("oqkv", results["blockwise"], results["reference"], strict=True):
        what = "values" if name == "o" else "gradients"
        proves = (f"attention_backend=blockwise, every mask and ragged sizes, {what}", "reference backend")
        assert_close(actual, expected, 2e-6, proves=proves)


def test_blocks_are_equal_and_pad_little():
    for length in range(1, 3000):
        size, number = block_size(length, 512), -(-length // 512)
        assert size <= min(512, length)
        assert 0 <= number * size - length < 32 * number


def test_blockwise_has_a_gradient_for_a_trained_bias():
    qkv, table = inputs(2), normal(8, N, seed=9)

    def total(table, backend):
        bias = BucketBias(table, bidirectional=True, farthest=6)
        return (attention_ops.attend(*qkv, Mask(causal=True), bias=bias, backend=backend) ** 2).sum()

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    expected = gradient(table, "reference")
    assert np.abs(expected).max() > 0.01
    assert_close(gradient(table, "blockwise"), expected, 1e-6)


@pytest.mark.long
def test_blockwise_drops_the_same_weights_in_both_passes():
    q, k, v = normal(1, 9, 1, 2), normal(1, 9, 1, 2, seed=1), normal(1, 9, 1, 2, seed=2)
    scoring, key = attention_ops.Scoring(1.0, None, 0.5), jax.random.key(0)

    @jax.jit
    def out(q, k, v):
        return blockwise_file.blockwise(
            attention_ops.Operands(q, k, v, Mask(causal=True), scoring, dropout_key=key), block=4
        )

    # the result is linear in v; in q, its slope is found by differences
    of_q, of_v = jax.jit(jax.grad(lambda q, v: out(q, k, v).sum(), argnums=(0, 1)))(q, v)
    assert_close((of_v * v).sum(), out(q, k, v).sum(), 1e-5)
    slope = (out(q.at[0, 5, 0, 0].add(1e-2), k, v).sum() - out(q.at[0, 5, 0, 0].add(-1e-2), k, v).sum()) / 2e-2
    assert_close(of_q[0, 5, 0, 0], slope, 1e-3)


def test_causality_by_gradient():
    q, k, v = normal(1, T, N, H), normal(1, T, N, H, seed=1), normal(1, T, N, H, seed=2)
    slopes = jax.jit(jax.jacrev(lambda v: attention_ops.attend(q, k, v, Mask(causal=True))[0].sum((1, 2))))(v)
    for t in range(T):
        seen = np.abs(slopes[t, 0]).sum((1, 2)) > 0
        np.testing.assert_array_equal(seen, np.arange(T) <= t)


def test_softmax_is_float32_and_the_result_has_the_input_dtype():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(4))
    out = attention_ops.attend(q, k, v)
    assert out.dtype == jnp.bfloat16
    assert_close(out, oracles.attention_core(*(np.asarray(x, np.float64) for x in (q, k, v))), 2**-7)


def test_blockwise_rounds_a_sum_over_blocks_once():
    q, k = jnp.zeros((1, 1, 1, 1), jnp.bfloat16), jnp.zeros((1, 64, 1, 1), jnp.bfloat16)
    v = jnp.abs(normal(1, 64, 1, 1)).astype(jnp.bfloat16)  # weights of 1 / 64, exactly
    out = SMALL_BLOCKS.run(attention_ops.Operands(q, k, v, Mask(), attention_ops.Scoring(1.0, None, 0.0)))
    assert out.item() == np.float64(v).mean().astype(jnp.bfloat16)


def test_dropout_keeps_the_mean_and_drops_whole_weights():
    q, k, v = normal(1, 1, 1, H), normal(1, 64, 1, H, seed=1), jnp.ones((1, 64, 1, H))
    keys = jax.random.split(jax.random.key(0), 300)
    drop = jax.vmap(lambda key: attention_ops.attend(q, k, v, dropout_rate=0.3, dropout_key=key)[0, 0, 0, 0])
    sums = jax.jit(drop)(keys)
    assert np.std(sums) > 0.01
    assert abs(np.mean(sums) - 1) < 0.03


def test_basic_self_attention():
    x = normal(2, 5, 4)
    out, _ = apply(BasicAttention(tiny("decoder_lm", dim=4, num_heads=1, attention="basic")), {}, x)
    x64 = np.float64(x)
    expected = oracles.softmax(x64 @ x64.swapaxes(1, 2)) @ x64
    assert_close(out, expected, 1e-6, proves=("attention=basic", "NumPy float64"))


def test_a_bias_of_local_heads_is_the_part_of_each_device():
    slopes, positions = np.array([1, 0.5, 0.25, 0.1], np.float32), np.arange(3)
    split = jax.shard_map(
        lambda own: own.block(positions, positions),
        mesh=jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2]),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("tensor"),
        check_vma=False,
    )
    actual = jax.jit(split)(LocalHeadsBias(AlibiBias(slopes), ("tensor",), 2))
    np.testing.assert_array_equal(actual, -slopes[:, None, None] * abs(positions[:, None] - positions))


class TestSeedMistakes:
    """Formulas that are wrong in the seed documents: ours equals the correct one and differs from the wrong one."""

    def test_the_default_scale_is_one_over_the_root_of_the_head_size(self):
        q, k, v = inputs(4)
        out = np.float64(attention_ops.attend(q, k, v))
        mistaken = oracles.attention_core(np.float64(q) * H**0.5 / H**2, np.float64(k), np.float64(v))
        assert np.abs(out - mistaken).max() > 0.01

    def test_weights_are_normalized_before_the_sum(self):
        x = np.float64(normal(1, 5, 4))
        out = attention_ops.attend(*[jnp.asarray(x, jnp.float32)[:, :, None]] * 3, scale=1.0)[:, :, 0]
        mistaken = (x @ x.swapaxes(1, 2)) @ x
        assert np.abs(out - mistaken).max() > 0.01

    def test_a_hidden_row_is_neither_uniform_nor_nan(self):
        q, k, v = inputs(4)
        out = attention_ops.attend(q, k, v, jnp.zeros((B, 1, T, S), bool))
        uniform = np.repeat(np.asarray(v).mean(1, keepdims=True), T, 1)
        np.testing.assert_array_equal(out, 0)
        assert np.abs(uniform).max() > 0.1

    def test_the_upper_triangle_is_masked(self):
        mask = np.asarray(Mask(causal=True).dense(4, 4)[0, 0])
        assert not mask[np.triu_indices(4, 1)].any()
        assert mask[np.tril_indices(4)].all()
