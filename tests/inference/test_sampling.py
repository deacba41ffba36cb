"""Choosing tokens, against probabilities worked out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import normal
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import sampling
from tformer_jax.special_tokens import BOS, PAD

LOGITS = normal(3, 12, seed=4)


def softmax(logits) -> np.ndarray:
    exp = np.exp(np.float64(logits) - np.float64(logits).max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def test_greedy_takes_the_most_probable():
    chosen = sampling.choose(LOGITS, DecodeConfig(), jax.random.key(0))
    expected = np.where(np.isin(np.arange(12), (PAD, BOS)), -np.inf, LOGITS).argmax(-1)
    np.testing.assert_array_equal(chosen, expected)
    assert chosen.dtype == jnp.int32


@pytest.mark.parametrize("strategy", ["greedy", "sample"])
def test_pad_and_bos_are_never_chosen(strategy):
    logits = jnp.zeros((200, 5)).at[:, jnp.array([PAD, BOS])].set(50.0)
    chosen = sampling.choose(logits, DecodeConfig(strategy=strategy), jax.random.key(0))
    assert not np.isin(chosen, (PAD, BOS)).any()


def test_temperature_divides_the_logits():
    np.testing.assert_allclose(sampling.restrict(LOGITS, DecodeConfig(temperature=0.5)), LOGITS / 0.5, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 12, 40])
def test_top_k_keeps_k(k):
    kept = np.isfinite(sampling.keep_top_k(LOGITS, k))
    ranks = np.argsort(np.argsort(-np.asarray(LOGITS), axis=-1), axis=-1)
    np.testing.assert_array_equal(kept, ranks < k)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_top_p_keeps_the_smallest_set_of_that_mass(p):
    kept = np.isfinite(sampling.keep_top_p(LOGITS, p))
    for row, probabilities in zip(kept, softmax(LOGITS), strict=True):
        order = np.argsort(-probabilities)
        expected, mass = {int(order[0])}, probabilities[order[0]]
        for token in order[1:]:
            if mass >= p:
                break
            expected.add(int(token))
            mass += probabilities[token]
        assert set(np.flatnonzero(row)) == expected


def test_samples_follow_the_restricted_distribution():
    cfg = DecodeConfig(strategy="sample", temperature=0.7, top_k=4)
    logits = jnp.tile(LOGITS[:1], (20_000, 1))
    chosen = np.asarray(sampling.choose(logits, cfg, jax.random.key(1)))
    row = np.where(np.isin(np.arange(12), (PAD, BOS)), -np.inf, np.float64(LOGITS[0])) / 0.7
    row[np.argsort(row)[:-4]] = -np.inf
    expected = softmax(row) * len(chosen)
    observed = np.bincount(chosen, minlength=12)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 16.3  # three degrees of freedom, p = 0.001
