"""Weights are converted for decoding once, and released with the parameters."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from tests.helpers import build, tiny
from tformer_jax.inference import layout
from tformer_jax.inference.layout import decoding_layout


def built():
    model, params = build(tiny("decoder_lm", tie_embeddings="output"))
    return model, jax.tree.map(jnp.asarray, params)


def test_the_same_arrays_are_converted_once():
    model, params = built()
    _, first = decoding_layout(model, params)
    _, again = decoding_layout(model, jax.tree.map(lambda leaf: leaf, params))
    assert all(a is b for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))
    _, other = decoding_layout(model, jax.tree.map(lambda leaf: leaf + 1, params))
    assert not np.array_equal(other["head"]["kernel"], first["head"]["kernel"])


@pytest.fixture
def frozen_heap():
    """Excludes the objects of earlier tests from collections, which would take seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_converted_arrays_are_freed_with_the_originals(frozen_heap):
    before = len(layout._converted)
    model, params = built()
    decoding_layout(model, params)
    assert len(layout._converted) == before + 1
    del params
    gc.collect()
    assert len(layout._converted) == before


def test_unchanged_arrays_are_not_cached():
    model, params = build(tiny("decoder_lm", attention="basic", num_heads=1, head_dim=None, tie_embeddings="none"))
    before = len(layout._converted)
    assert jax.tree.leaves(decoding_layout(model, params)[1])[0] is jax.tree.leaves(params)[0]
    assert len(layout._converted) == before


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "bfloat16"), ("bfloat16", None)])
def test_kernels_are_rounded_once_with_the_same_logits(dtype, precision):
    """Norms, biases and embeddings are not rounded; without a precision, kernels of float32 are not either."""
    model, params = build(tiny("decoder_lm", dtype=dtype, tie_embeddings="output"))
    params = jax.tree.map(jnp.asarray, params)
    tokens = jnp.arange(8).reshape(2, 4) + 3
    with jax.default_matmul_precision(precision):
        expected = jax.jit(model.apply)({"params": params}, tokens)
        converted, own = decoding_layout(model, params)
        actual = jax.jit(converted.apply)({"params": own}, tokens)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, atol=0 if dtype == "float32" else 0.01)  # one product for q, k and v
    dtypes = {path: leaf.dtype for path, leaf in flatten_dict(own).items()}
    assert {path[-1] for path, dtype in dtypes.items() if dtype == jnp.bfloat16} == {"kernel"}
    assert {dtype for path, dtype in dtypes.items() if path[-1] == "kernel"} == {jnp.dtype(jnp.bfloat16)}
    if dtype == "float32":
        assert {leaf.dtype for leaf in jax.tree.leaves(decoding_layout(model, params)[1])} == {jnp.dtype(jnp.float32)}


def test_kernels_of_latent_attention_that_queries_are_multiplied_by_are_not_rounded():
    """Regression test: the logits of a decoding step differed by rounding errors of bfloat16."""
    model, params = build(tiny("decoder_lm", attention="mla", position="rotary", tie_embeddings="none"))
    params = jax.tree.map(jnp.asarray, params)

    def logits(model, params):
        cache = model.apply({}, 2, 4, method="init_cache")
        _, cache = model.apply({"params": params}, jnp.array([[3, 4], [5, 6]]), cache, method="decode_step")
        return model.apply({"params": params}, jnp.array([[7], [8]]), cache, method="decode_step")[0]

    with jax.default_matmul_precision("bfloat16"):
        expected, (converted, own) = jax.jit(logits, static_argnums=0)(model, params), decoding_layout(model, params)
        actual = jax.jit(logits, static_argnums=0)(converted, own)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(actual, expected)
    assert {path[-2]: leaf.dtype.name for path, leaf in flatten_dict(own).items() if path[-1] == "kernel"} == {
        **dict.fromkeys(("query", "latent", "rotated", "output", "expand", "contract", "head"), "bfloat16"),
        **dict.fromkeys(("key", "value"), "float32"),
    }
