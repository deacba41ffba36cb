"""The attention core: every backend against a float64 loop, and what a hidden row does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, normal
from tformer_jax.config import ConfigError
from tformer_jax.nn import attention_ops, masks

B, T, S, N, H = 2, 5, 6, 4, 3
BACKENDS = list(attention_ops.BACKENDS)


def inputs(K: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)


def random_mask(heads: int) -> jax.Array:
    """Some rows see nothing."""
    mask = np.random.default_rng(3).random((B, heads, T, S)) < 0.6
    mask[0, :, 1] = False
    return jnp.asarray(mask)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("heads", [None, 1, N], ids=["unmasked", "shared mask", "mask a head"])
def test_equals_the_formula(backend, K, heads):
    q, k, v = inputs(K)
    mask = None if heads is None else random_mask(heads)
    expected_mask = None if mask is None else np.broadcast_to(mask, (B, N, T, S))
    expected = oracles.attention_core(*map(np.float64, (q, k, v)), expected_mask)
    assert_close(attention_ops.attend(q, k, v, mask, backend=backend), expected, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_rows_are_zero_in_value_and_gradient(backend):
    q, k, v = inputs(2)
    mask = jnp.ones((B, 1, T, S), bool).at[:, :, 2].set(False)

    def row_sum(q, k, v):
        return attention_ops.attend(q, k, v, mask, backend=backend)[:, 2].sum()

    value, grads = jax.value_and_grad(row_sum, argnums=(0, 1, 2))(q, k, v)
    assert value == 0
    for grad in grads:
        np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_stay_finite_beside_hidden_rows(backend):
    mask = random_mask(1)
    grads = jax.grad(lambda *qkv: attention_ops.attend(*qkv, mask, backend=backend).sum(), argnums=(0, 1, 2))(
        *inputs(2)
    )
    for grad in grads:
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("K", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_backends_have_the_same_gradients(K):
    mask, weights = random_mask(1), normal(B, T, N, H, seed=4)

    def gradients(backend):
        def total(*qkv):
            return (weights * attention_ops.attend(*qkv, mask, backend=backend)).sum()

        return jax.grad(total, argnums=(0, 1, 2))(*inputs(K))

    for reference, xla in zip(gradients("reference"), gradients("xla"), strict=True):
        assert_close(xla, reference, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_by_hand(backend):
    # H = 4: both keys are unit vectors times 2 ln 3, the query sees logits ln 3 and 0, weights 3/4 and 1/4
    q = jnp.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    k = 2 * jnp.log(3.0) * jnp.eye(4)[:2].reshape(1, 2, 1, 4)
    v = jnp.array([[8.0, 0, 0, 0], [0, 8.0, 0, 0]]).reshape(1, 2, 1, 4)
    np.testing.assert_allclose(attention_ops.attend(q, k, v, backend=backend).ravel(), [6, 2, 0, 0], rtol=1e-6)
    doubled = attention_ops.attend(q, k, v, scale=1.0, backend=backend).ravel()
    np.testing.assert_allclose(doubled, [7.2, 0.8, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hidden_key_stays_hidden_beside_hopeless_logits(backend):
    q, k = jnp.ones((1, 1, 1, 1)), jnp.array([-1e6, 0.0]).reshape(1, 2, 1, 1)
    v = jnp.array([3.0, 5.0]).reshape(1, 2, 1, 1)
    mask = jnp.array([True, False]).reshape(1, 1, 1, 2)
    assert attention_ops.attend(q, k, v, mask, backend=backend).item() == 3


def test_causality_by_gradient():
    q, k, v = normal(1, T, N, H), normal(1, T, N, H, seed=1), normal(1, T, N, H, seed=2)
    for t in range(T):
        grad = jax.grad(lambda v, t=t: attention_ops.attend(q, k, v, masks.causal(T))[0, t].sum())(v)
        seen = np.abs(grad[0]).sum((1, 2)) > 0
        np.testing.assert_array_equal(seen, np.arange(T) <= t)


def test_softmax_is_float32_and_the_result_has_the_input_dtype():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(4))
    out = attention_ops.attend(q, k, v)
    assert out.dtype == jnp.bfloat16
    assert_close(out, oracles.attention_core(*(np.asarray(x, np.float64) for x in (q, k, v))), 2**-7)


def test_dropout_keeps_the_mean_and_drops_whole_weights():
    q, k, v = normal(1, 1, 1, H), normal(1, 64, 1, H, seed=1), jnp.ones((1, 64, 1, H))
    keys = jax.random.split(jax.random.key(0), 300)
    drop = jax.vmap(lambda key: attention_ops.attend(q, k, v, dropout_rate=0.3, dropout_key=key)[0, 0, 0, 0])
    sums = drop(keys)
    assert np.std(sums) > 0.01
    assert abs(np.mean(sums) - 1) < 0.03


def test_basic_self_attention():
    x = normal(2, 5, 4)
    x64 = np.float64(x)
    expected = oracles.softmax(x64 @ x64.swapaxes(1, 2)) @ x64
    assert_close(attention_ops.basic_self_attention(x), expected, 1e-6)


def test_unknown_backend_says_what_is_there():
    with pytest.raises(ConfigError, match="'flash' is not here; write one of reference, xla"):
        attention_ops.attend(*inputs(4), backend="flash")


def test_xla_refuses_to_drop_weights():
    with pytest.raises(ConfigError, match="cannot drop attention weights"):
        attention_ops.attend(*inputs(4), backend="xla", dropout_rate=0.5, dropout_key=jax.random.key(0))


class TestSeedMistakes:
    """Formulas that the seed documents get wrong: ours equals the right one and differs from the mistaken one."""

    def test_scale_is_the_root_of_the_head_size_not_its_square(self):
        q, k, v = inputs(4)
        out = np.float64(attention_ops.attend(q, k, v))
        mistaken = oracles.attention_core(np.float64(q) * H**0.5 / H**2, np.float64(k), np.float64(v))
        assert np.abs(out - mistaken).max() > 0.01

    def test_weights_are_normalised_before_the_sum(self):
        x = np.float64(normal(1, 5, 4))
        out = np.float64(attention_ops.basic_self_attention(jnp.asarray(x, jnp.float32)))
        mistaken = (x @ x.swapaxes(1, 2)) @ x
        assert np.abs(out - mistaken).max() > 0.01

    def test_a_hidden_row_is_neither_uniform_nor_nan(self):
        q, k, v = inputs(4)
        out = attention_ops.attend(q, k, v, jnp.zeros((B, 1, T, S), bool))
        uniform = np.repeat(np.asarray(v).mean(1, keepdims=True), T, 1)
        np.testing.assert_array_equal(out, 0)
        assert np.abs(uniform).max() > 0.1

    def test_the_upper_triangle_is_the_hidden_one(self):
        mask = np.asarray(masks.causal(4)[0, 0])
        assert not mask[np.triu_indices(4, 1)].any()
        assert mask[np.tril_indices(4)].all()
