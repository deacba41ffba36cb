"""Sampling of tokens, against probabilities worked out in NumPy."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests import oracles
from tests.helpers import normal, rest_slow
from tformer_jax.config import DecodeConfig
from tformer_jax.inference import sampling
from tformer_jax.inference.constraints import NO_CONSTRAINTS, forbid
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.nn.xla import top_k
from tformer_jax.special_tokens import BOS, PAD_TOKEN

LOGITS = normal(3, 12, seed=4)
NEVER = np.isin(np.arange(12), (PAD_TOKEN, BOS))
CHI_SQUARE = (0.0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9)
"""Critical values of chi-squared for p = 0.001, by degrees of freedom."""


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def rows(count: int, **changes) -> RowSettings:
    """Returns sampling settings, given for all rows or for each row."""
    given = {name: jnp.asarray(value) for name, value in changes.items()}
    usual = RowSettings.from_config(DecodeConfig(strategy="sample"), count)
    return usual.replace(
        **{name: jnp.broadcast_to(value, count).astype(getattr(usual, name).dtype) for name, value in given.items()}
    )


@jax.jit
def choose(logits, settings, keys) -> jax.Array:
    """Chooses among the tokens that may be generated, as `SamplingState.advance` does."""
    return sampling.choose(forbid(logits, NO_CONSTRAINTS), settings, keys)


restrict = jax.jit(sampling.restrict)
keep_top_k, keep_top_p = jax.jit(sampling.keep_top_k), jax.jit(sampling.keep_top_p)


def test_greedy_selects_the_most_probable_token():
    chosen = choose(LOGITS, RowSettings.from_config(DecodeConfig(), 3), keys(3))
    expected = np.where(NEVER, -np.inf, LOGITS).argmax(-1)
    np.testing.assert_array_equal(chosen, expected)
    assert chosen.dtype == jnp.int32


def test_ties_select_the_first_token():
    logits = np.zeros((2, 3, 500), np.float32)
    logits[0, 1, 200:] = 4
    np.testing.assert_array_equal(sampling.most_probable(jnp.asarray(logits)), logits.argmax(-1))


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow([(1300, 30), (1, 1), (600, 1), (31, 31), (5000, 5), (40_000, 2)], 1))
def test_top_k_equals_a_stable_sort(case):
    size, k = case
    values_of = st.sampled_from([-np.inf, -1.5, 0.0, 2.0, np.inf])
    search = jax.jit(functools.partial(top_k, k=k))

    @given(
        st.sampled_from([-np.inf, -3.0]).flatmap(
            lambda rest: arrays(np.float32, (2, size), elements=values_of, fill=st.just(rest))
        )
    )
    def check(values):
        expected = np.argsort(-values, axis=-1, kind="stable")[:, :k]
        actual, indices = search(values[:, None])
        np.testing.assert_array_equal(indices[:, 0], expected)
        np.testing.assert_array_equal(actual[:, 0], np.take_along_axis(values, expected, axis=1))
        assert indices.dtype == jnp.int32

    check()


@pytest.mark.parametrize(("size", "k"), [(5000, 5), (577, 9), (40_001, 3)])
def test_top_k_in_an_incomplete_last_block(size, k):
    search = jax.jit(functools.partial(top_k, k=k))
    rising = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(search(rising)[1], size - 1 - np.arange(k))
    nothing = np.append(np.full(size - 1, -np.inf, np.float32), np.float32(0))
    np.testing.assert_array_equal(search(nothing)[1], [size - 1, *range(k - 1)])


@pytest.mark.parametrize("k", [1, 5, 70, 100])
def test_top_k_inside_a_loop(k):
    values = np.random.default_rng(k).permutation(4 * 5000).reshape(4, 5000).astype(np.float32)
    actual, indices = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda i, _: top_k(x + i, k), top_k(x, k)))(values)
    np.testing.assert_array_equal(actual, -np.sort(-values, axis=-1)[:, :k] + 1)
    np.testing.assert_array_equal(np.take_along_axis(values, np.asarray(indices), axis=1) + 1, actual)


def test_top_k_never_sorts_all_values():
    def used_in_part(values):
        actual, indices = top_k(values, 4)
        return actual[:, :2], indices

    for size in (400, 5000):
        program = jax.jit(used_in_part).lower(jax.ShapeDtypeStruct((2, size), jnp.float32)).compile().as_text()
        sorted_sizes = [int(size) for size in re.findall(r"\[2,(\d+)\]\S* sort\(", program)]
        assert all(size <= 4 for size in sorted_sizes), sorted_sizes


@pytest.mark.parametrize("strategy", ["greedy", "sample"])
def test_pad_and_bos_are_never_chosen(strategy):
    logits = jnp.zeros((200, 5)).at[:, jnp.array([PAD_TOKEN, BOS])].set(50.0)
    chosen = choose(logits, RowSettings.from_config(DecodeConfig(strategy=strategy), 200), keys(200))
    assert not np.isin(chosen, (PAD_TOKEN, BOS)).any()


def test_temperature_divides_the_logits():
    restricted = restrict(LOGITS, rows(3, temperature=[0.5, 1.0, 2.0]))
    np.testing.assert_allclose(restricted, LOGITS / np.array([[0.5], [1.0], [2.0]]), rtol=1e-6)


def test_temperature_zero_is_greedy():
    expected = np.where(NEVER, -np.inf, LOGITS).argmax(-1)
    np.testing.assert_array_equal(choose(LOGITS, rows(3, temperature=0.0), keys(3)), expected)


@pytest.mark.parametrize("k", [1, 3, 12, 40])
def test_top_k_keeps_k(k):
    remaining = np.isfinite(keep_top_k(LOGITS, jnp.array([k, 0, 2])))
    ranks = np.argsort(np.argsort(-np.asarray(LOGITS), axis=-1), axis=-1)
    np.testing.assert_array_equal(remaining, ranks < np.array([[k], [12], [2]]))


def test_top_k_keeps_ties():
    logits = jnp.array([[-0.0, 0.0, -1.0, 5.0, -jnp.inf], [-2.0, -2.0, -2.0, -3.0, -3.0]])
    remaining = keep_top_k(logits, jnp.array([2, 4])) > -jnp.inf
    np.testing.assert_array_equal(remaining, [[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("sign", [-1, 1])
def test_top_k_distinguishes_adjacent_floats(sign):
    neighbors = jnp.asarray(1 + np.arange(12) * 2.0**-23, jnp.float32)
    for k in range(1, 13):
        remaining = keep_top_k(sign * neighbors[None], jnp.array([k])) > -jnp.inf
        assert remaining.sum() == k


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_top_p_keeps_the_smallest_set_of_that_mass(p):
    masses = (p, 1.0, 0.6)
    remaining = np.isfinite(keep_top_p(LOGITS, jnp.array(masses)))
    for row, probabilities, mass_wanted in zip(remaining, oracles.softmax(np.float64(LOGITS)), masses, strict=True):
        order = np.argsort(-probabilities)
        expected, mass = {int(order[0])}, probabilities[order[0]]
        for token in order[1:]:
            if mass >= mass_wanted:
                break
            expected.add(int(token))
            mass += probabilities[token]
        assert set(np.flatnonzero(row)) == expected


def test_min_p_keeps_tokens_above_the_threshold():
    wanted = np.array([[0.0], [0.3], [1.0]])
    probabilities = oracles.softmax(np.float64(LOGITS))
    remaining = np.isfinite(sampling.keep_min_p(LOGITS, jnp.asarray(wanted[:, 0], jnp.float32)))
    np.testing.assert_array_equal(remaining, probabilities >= wanted * probabilities.max(-1, keepdims=True))
    assert remaining.sum(-1).tolist()[0] == 12 > remaining.sum(-1)[1] > 1 == remaining.sum(-1)[2]


def test_restrictions_are_applied_in_order():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    # top-k leaves 4/7 and 3/7; squared by the temperature and normalized again they are 16/25 and 9/25
    for changes, remaining in (
        ({"top_p": 0.63}, [1, 0, 0, 0]),
        ({"top_p": 0.65}, [1, 1, 0, 0]),
        ({"min_p": 0.57}, [1, 0, 0, 0]),
        ({"min_p": 0.56}, [1, 1, 0, 0]),
    ):
        restricted = restrict(logits, rows(1, temperature=0.5, top_k=2, **changes))
        np.testing.assert_array_equal(np.isfinite(restricted)[0], remaining)


@given(
    arrays(np.float32, (3, 40), elements=st.floats(-30, 30, width=32, allow_subnormal=False)),
    st.integers(1, 45),
    st.floats(0, 1),
)
def test_a_threshold_is_exact(logits, k, p):
    remaining = np.asarray(keep_top_k(logits, jnp.full(3, k)) > -jnp.inf)
    np.testing.assert_array_equal(remaining, logits >= -np.sort(-logits, axis=-1)[:, min(k, 40) - 1][:, None])
    remaining = np.asarray(keep_top_p(logits, jnp.full(3, p, jnp.float32)) > -jnp.inf)
    for row, those, probabilities in zip(logits, remaining, oracles.softmax(np.float64(logits)), strict=True):
        assert those[row.argmax()]
        assert probabilities[those].sum() >= p - 1e-5
        without_last = those & (row > row[those].min())
        assert p == 1 or not without_last.any() or probabilities[without_last].sum() < p + 1e-5


@pytest.mark.long
def test_samples_follow_the_restricted_distribution_of_their_row():
    wanted = [
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.5},
        {"top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.4},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    ]
    each, names = 20_000, ("temperature", "top_k", "top_p", "min_p")
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given = {name: np.tile([{**off, **row}[name] for row in wanted], each) for name in names}
    logits = jnp.tile(LOGITS[:1], (each * len(wanted), 1))
    chosen = np.asarray(choose(logits, rows(len(logits), **given), keys(len(logits))))
    for number, row in enumerate(wanted):
        expected = oracles.sampled(LOGITS[0], **row) * each
        observed = np.bincount(chosen[number :: len(wanted)], minlength=12)
        possible = expected > 0
        assert observed[~possible].sum() == 0
        chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
        assert chi_square < CHI_SQUARE[possible.sum() - 1], row


@pytest.mark.long
def test_rows_use_their_own_keys_and_settings():
    each = rows(
        40,
        temperature=np.tile([3.0, 0.5, 1.0, 0.0], 10),
        top_k=np.arange(40) % 3,
        top_p=np.where(np.arange(40) % 5, 1.0, 0.5),
        sample=np.arange(40) % 7 > 0,
    )
    inputs = jax.device_get((normal(40, 12), each, jax.random.key_data(keys(40))))  # NumPy's slices compile nothing
    chosen = np.asarray(choose(*inputs[:2], jax.random.wrap_key_data(inputs[2])))
    for row in range(40):
        logits, alone, words = jax.tree.map(lambda leaf: leaf[row : row + 1], inputs)  # noqa: B023
        assert np.asarray(choose(logits, alone, jax.random.wrap_key_data(words)))[0] == chosen[row]
    assert len(np.unique(chosen)) > 5


def test_rows_of_a_config():
    cfg = DecodeConfig(
        strategy="sample",
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        min_new_tokens=4,
        beams=5,
    )
    actual = jax.tree.map(lambda leaf: leaf.tolist(), RowSettings.from_config(cfg, 2))
    assert dataclasses.asdict(actual) == {
        "sample": [True] * 2,
        "temperature": [0.5] * 2,
        "top_k": [3] * 2,
        "top_p": [pytest.approx(0.9)] * 2,
        "min_p": [pytest.approx(0.1)] * 2,
        "repetition": [pytest.approx(1.2)] * 2,
        "min_tokens": [4] * 2,
        "beams": [5] * 2,
        "placeholders": [0] * 2,
    }
    assert RowSettings.from_config(DecodeConfig(top_p=0.0), 1).top_p == 0
    for strategy in ("greedy", "beam"):
        assert not RowSettings.from_config(DecodeConfig(strategy=strategy, temperature=0.5), 2).sample.any()
