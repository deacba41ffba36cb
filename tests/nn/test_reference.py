"""Attention in chunks of queries equals the formula for all queries at once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, equations, normal
from tformer_jax.nn import xla
from tformer_jax.nn.attention_ops import Scoring, attend, reference
from tformer_jax.nn.masks import Mask

T = 71
"""More than two chunks of the smallest size, and not a multiple of it."""
MASKS = {
    "causal": Mask(causal=True, self_attention=True),
    "window": Mask(causal=True, window=20, self_attention=True),
    "window on both sides": Mask(window=9, self_attention=True),
    "padding": Mask(causal=True, padding_mask=np.arange(T)[None] % 5 > 0, self_attention=True),
}


def formula(q, k, v, mask):
    dense = np.broadcast_to(np.asarray(mask.dense(T, T)), (1, 2, T, T))
    return oracles.attention_core(*map(np.float64, (q, k, v)), dense)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_chunks_equal_the_formula(mask):
    assert reference.chunk_size(mask, T) < T
    q, k, v = normal(1, T, 2, 4), normal(1, T, 1, 4, seed=1), normal(1, T, 1, 4, seed=2)
    proves = ("attention_backend=reference, in chunks", "NumPy float64")
    actual = jax.jit(lambda q, k, v: attend(q, k, v, mask, backend="reference"))(q, k, v)
    assert_close(actual, formula(q, k, v, mask), 1e-6, proves=proves)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_of_chunks_equal_those_of_one_call(mask, monkeypatch):
    inputs = normal(1, T, 2, 4), normal(1, T, 1, 4, seed=1), normal(1, T, 1, 4, seed=2)
    weights = normal(1, T, 2, 4, seed=3)

    def gradients():
        total = lambda q, k, v: (attend(q, k, v, mask, backend="reference") * weights).sum()  # noqa: E731
        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*inputs)

    chunked = gradients()
    monkeypatch.setattr(xla, "SMALLEST_QUERY_CHUNK", T)
    for actual, expected in zip(chunked, gradients(), strict=True):
        assert_close(actual, expected, 1e-6)


def test_masks_without_skippable_keys_use_one_chunk():
    for mask in (Mask(), Mask(padding_mask=np.ones((1, T), bool)), Mask(causal=True, prefix=np.array([3], np.int32))):
        assert reference.chunk_size(mask, T) == T


@pytest.mark.parametrize("causal, window", list(itertools.product([True, False], [None, 1, 3, 100])))
def test_keys_outside_the_range_are_hidden(causal, window):
    """For every slice of queries: keys outside of the range are masked, the first and the last one in it are not."""
    mask, length = Mask(causal=causal, window=window), 7
    dense = mask.dense(length, length)
    dense = np.ones((length, length), bool) if dense is None else np.asarray(dense)[0, 0]
    for t in range(length):
        for size in range(1, length - t + 1):
            first, end = mask.key_range(t, size, length)
            seen = np.flatnonzero(dense[t : t + size].any(axis=0))
            assert (first, end) == (seen[0], seen[-1] + 1)


@pytest.mark.parametrize("size", [112, 144])
def test_the_scale_of_bfloat16_scores_is_not_rounded(size):
    """Rounding errors of products cancel in the mean; that of 144^-0.5 in bfloat16 would be 0.19 % of every score."""
    q = normal(1, 64, 4, size).astype(jnp.bfloat16)
    actual = reference.scores(q, q, None, Scoring(size**-0.5, None, 0.0))
    expected = size**-0.5 * np.einsum("BTNH,BSNH->BNTS", *(np.float64(q),) * 2)
    ratios = np.diagonal(actual, axis1=2, axis2=3) / np.diagonal(expected, axis1=2, axis2=3)
    assert abs(ratios.mean() - 1) < 2e-4


def test_float32_queries_are_only_multiplied():
    jaxpr = jax.make_jaxpr(lambda q: reference.scaled(q, 0.3))(normal(1, 2, 1, 4)).jaxpr
    assert [str(equation.primitive) for equation in jaxpr.eqns] == ["mul"]


def test_chunks_compute_five_eighths_of_the_scores():
    """Four chunks of causal attention: (1/4 + 2/4 + 3/4 + 4/4) / 4 = 5/8."""
    q = normal(1, 256, 1, 8)
    masks = {"chunks": Mask(causal=True), "at once": Mask(explicit=np.tri(256, dtype=bool)[None, None])}
    scores = {}
    for name, mask in masks.items():
        jaxpr = jax.make_jaxpr(lambda q, mask=mask: attend(q, q, q, mask, backend="reference"))(q)
        scores[name] = sum(equation.outvars[0].aval.size for equation in equations(jaxpr.jaxpr, "exp"))
    assert scores["chunks"] == 5 / 8 * scores["at once"]
