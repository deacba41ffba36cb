"""Token embeddings, their positions, and the output head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles, position_oracles
from tests.helpers import assert_close, init_module, normal, tiny
from tformer_jax import axes
from tformer_jax.nn.embeddings import InputEmbedding, OutputHead, TokenEmbedding
from tformer_jax.special_tokens import PAD

V, D = 11, 8
TOKENS = np.array([[1, 5, 5], [10, 0, 2]])


@pytest.mark.parametrize("scale", [True, False])
def test_looks_up_one_vector_per_token(scale):
    module = TokenEmbedding(tiny("decoder_lm", scale_embeddings=scale), V)
    params = init_module(module, TOKENS)
    factor = np.sqrt(D) if scale else 1
    assert_close(module.apply({"params": params}, TOKENS), params["embedding"][TOKENS] * factor, 1e-6)


@pytest.mark.parametrize(("initializer", "std"), [("xavier", 64**-0.5), ("normal", 0.02)])
def test_starts_with_the_standard_deviation_of_its_initializer(initializer, std):
    module = TokenEmbedding(tiny("decoder_lm", initializer=initializer, dim=64), 500)
    params = jax.jit(module.init)(jax.random.key(0), TOKENS)["params"]
    assert abs(np.std(params["embedding"].value) / std - 1) < 0.02


def test_positions_are_added_after_scaling():
    vectors = normal(2, 3, D)
    sinusoids = np.array([position_oracles.sinusoid(t, D) for t in range(3)])
    assert_close(InputEmbedding(tiny("decoder_lm")).apply({}, vectors), vectors + sinusoids, 1e-6)
    none = InputEmbedding(tiny("decoder_lm", position="none"))
    np.testing.assert_array_equal(none.apply({}, vectors), vectors)


def test_token_dropout_zeroes_whole_vectors_in_training():
    cfg = tiny("decoder_lm", position="none", dropout=0.0, token_dropout=0.25)
    module, vectors = InputEmbedding(cfg), normal(200, 100, D)
    np.testing.assert_array_equal(module.apply({}, vectors), vectors)
    dropped = np.asarray(module.apply({}, vectors, train=True, rngs={"dropout": jax.random.key(0)}))
    remaining = dropped[..., 0] != 0
    assert_close(dropped, np.where(remaining[..., None], np.asarray(vectors) / 0.75, 0), 1e-6)
    assert abs(remaining.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / remaining.size)


def test_rows_may_have_different_positions():
    vectors, positions = normal(2, 3, D), np.array([[4, 5, 6], [0, 0, 1]])
    expected = vectors + np.array([[position_oracles.sinusoid(p, D) for p in row] for row in positions])
    assert_close(InputEmbedding(tiny("decoder_lm")).apply({}, vectors, positions), expected, 1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_untied_head(bias):
    cfg = tiny("decoder_lm")
    head = OutputHead(cfg, axes.VOCAB, V, use_bias=bias)
    x = normal(2, 3, D)
    params = init_module(head, x)
    assert set(params) == ({"kernel", "bias"} if bias else {"kernel"})
    expected = oracles.logits(np.float64(x), oracles.f64(params), None, cfg)
    assert_close(head.apply({"params": params}, x), expected, 1e-6)


def test_tied_head_reads_the_table_unscaled():
    table = TokenEmbedding(tiny("decoder_lm"), V)
    params = init_module(table, TOKENS)
    x = normal(2, 3, D)
    logits = table.apply({"params": params}, x, method="attend")
    assert_close(logits, np.float64(x) @ np.float64(params["embedding"]).T, 1e-6)


def test_logits_are_not_rounded_to_the_computation_dtype():
    head = OutputHead(tiny("decoder_lm", dtype="bfloat16"), axes.VOCAB, V, use_bias=False)
    x = normal(2, 3, D).astype(jnp.bfloat16)
    params = init_module(head, x)
    logits = head.apply({"params": params}, x)
    rounded = np.asarray(params["kernel"].astype(jnp.bfloat16), np.float64)
    assert logits.dtype == jnp.float32
    assert_close(logits, np.asarray(x, np.float64) @ rounded, 1e-6)


def test_ids_outside_the_vocabulary_give_nan():
    module = TokenEmbedding(tiny("decoder_lm"), V)
    params = init_module(module, TOKENS)
    vectors = module.apply({"params": params}, np.array([[-100, -2, PAD, 0, V - 1, V]]))
    np.testing.assert_array_equal(np.isnan(vectors).all(-1), [[True, True, False, False, False, True]])
    np.testing.assert_array_equal(np.isnan(vectors).any(-1), [[True, True, False, False, False, True]])


def test_token_types_outside_the_table_give_nan():
    module = InputEmbedding(tiny("classifier", token_types=2))
    x = normal(1, 4, D)
    params = init_module(module, x)
    vectors = module.apply({"params": params}, x, types=np.array([[-1, 0, 1, 2]]))
    np.testing.assert_array_equal(np.isnan(vectors).all(-1), [[True, False, False, True]])


def test_the_standard_deviation_of_embeddings_can_be_set():
    module = TokenEmbedding(tiny("decoder_lm", embedding_std=1.0, dim=64), 500)
    params = jax.jit(module.init)(jax.random.key(0), TOKENS)["params"]
    assert abs(np.std(params["embedding"].value) - 1) < 0.02


@pytest.mark.parametrize("name", ["tokens", "types", "positions"])
def test_gradients_of_bfloat16_tables_are_summed_in_float32(name):
    """Regression test: sums in bfloat16 end at 256. Each feature of row 1 is used 600 times, and of others never."""
    cfg = tiny("classifier", position="learned", token_types=2, max_length=3, dropout=0.0, scale_embeddings=False)
    cfg = dataclasses.replace(cfg, param_dtype="bfloat16")
    ones, vectors = jnp.ones((300, 2), jnp.int32), jnp.zeros((300, 2, D))
    module = TokenEmbedding(cfg, V) if name == "tokens" else InputEmbedding(cfg)
    inputs = (ones,) if name == "tokens" else (vectors, ones, ones)
    params = init_module(module, *inputs)
    grads = jax.grad(lambda params: module.apply({"params": params}, *inputs).sum())(params)
    (table,) = jax.tree.leaves(grads if name == "tokens" else grads[name])
    assert table.dtype == jnp.bfloat16
    expected = np.zeros(table.shape)
    expected[1] = 600
    assert_close(np.float64(table), expected, 0.01)


def test_the_gradient_of_the_default_token_type_is_summed_in_float32():
    """Regression test: the sum of 4,096 ones in bfloat16 ended at 1,024."""
    cfg = tiny("classifier", token_types=2, max_length=64, dropout=0.0, dtype="bfloat16")
    module, vectors = InputEmbedding(cfg), jnp.zeros((64, 64, D), jnp.bfloat16)
    params = init_module(module, vectors)

    def total(params):
        return module.apply({"params": params}, vectors).astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(params)["types"], np.repeat([[4096.0], [0.0]], D, axis=1))
