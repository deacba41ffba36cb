"""Choosing tokens, against probabilities worked out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import normal
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import sampling
from tformer_jax.special_tokens import BOS, PAD

LOGITS = normal(3, 12, seed=4)


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def test_greedy_takes_the_most_probable():
    chosen = sampling.choose(LOGITS, DecodeConfig(), keys(3))
    expected = np.where(np.isin(np.arange(12), (PAD, BOS)), -np.inf, LOGITS).argmax(-1)
    np.testing.assert_array_equal(chosen, expected)
    assert chosen.dtype == jnp.int32


def test_the_first_of_equals_is_most_probable():
    logits = np.zeros((2, 3, 5), np.float32)
    logits[0, 1, 2:] = 4
    np.testing.assert_array_equal(sampling.most_probable(jnp.asarray(logits)), logits.argmax(-1))


@pytest.mark.parametrize("strategy", ["greedy", "sample"])
def test_pad_and_bos_are_never_chosen(strategy):
    logits = jnp.zeros((200, 5)).at[:, jnp.array([PAD, BOS])].set(50.0)
    chosen = sampling.choose(logits, DecodeConfig(strategy=strategy), keys(200))
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
    for row, probabilities in zip(kept, oracles.softmax(np.float64(LOGITS)), strict=True):
        order = np.argsort(-probabilities)
        expected, mass = {int(order[0])}, probabilities[order[0]]
        for token in order[1:]:
            if mass >= p:
                break
            expected.add(int(token))
            mass += probabilities[token]
        assert set(np.flatnonzero(row)) == expected


def test_top_p_counts_the_mass_that_temperature_and_top_k_leave():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    # top-k leaves 4/7 and 3/7; squared by the temperature and normalised again they are 16/25 and 9/25
    for p, kept in ((0.63, [1, 0, 0, 0]), (0.65, [1, 1, 0, 0])):
        restricted = sampling.restrict(logits, DecodeConfig(temperature=0.5, top_k=2, top_p=p))
        np.testing.assert_array_equal(np.isfinite(restricted)[0], kept)


def test_samples_follow_the_restricted_distribution():
    cfg = DecodeConfig(strategy="sample", temperature=0.7, top_k=4)
    logits = jnp.tile(LOGITS[:1], (20_000, 1))
    chosen = np.asarray(sampling.choose(logits, cfg, keys(20_000)))
    row = np.where(np.isin(np.arange(12), (PAD, BOS)), -np.inf, np.float64(LOGITS[0])) / 0.7
    row[np.argsort(row)[:-4]] = -np.inf
    expected = oracles.softmax(row) * len(chosen)
    observed = np.bincount(chosen, minlength=12)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 16.3  # three degrees of freedom, p = 0.001


def test_a_row_is_sampled_by_its_own_key():
    cfg = DecodeConfig(strategy="sample", temperature=3.0)
    logits, row_keys = normal(40, 12), keys(40)
    chosen = np.asarray(sampling.choose(logits, cfg, row_keys))
    np.testing.assert_array_equal(sampling.choose(logits[7:9], cfg, row_keys[7:9]), chosen[7:9])
    assert len(np.unique(chosen)) > 5
