"""Likelihood of a split: sums over all batches, for any number of pending batches, and caching of batches."""

import jax
import numpy as np
import pytest

from tests.helpers import build, tiny
from tformer_jax.eval import likelihood
from tformer_jax.eval.likelihood import Likelihood


class Counted:
    """Batches of a split, with the number of times they were built."""

    def __init__(self, count: int):
        draw = np.random.default_rng(0)
        windows = draw.integers(4, 7, (count, 2, 5), np.int32)
        self.batches = [{"tokens": window[:, :-1], "targets": window[:, 1:]} for window in windows]
        self.made = 0

    def __call__(self):
        self.made += 1
        return iter(self.batches)


def one_by_one(model, params, batches) -> tuple[float, float]:
    loss, hits, count = sum(np.float64(likelihood._sums(model, params, batch)) for batch in batches)
    return loss / count, 100 * hits / count


@pytest.mark.parametrize("count", [1, likelihood.MAX_PENDING_BATCHES, 3 * likelihood.MAX_PENDING_BATCHES])
def test_sums_do_not_depend_on_the_number_of_pending_batches(count):
    model, params = build(tiny("decoder_lm"))
    split = Counted(count)
    assert Likelihood(model, split)(params) == one_by_one(model, params, split.batches)


@pytest.mark.parametrize(("room", "made"), [(2**20, 1), (100, 2)])
def test_batches_of_a_small_split_are_cached(monkeypatch, room, made):
    monkeypatch.setattr(likelihood, "CACHED_BYTES", room)
    model, params = build(tiny("decoder_lm"))
    split = Counted(3)
    evaluate = Likelihood(model, split)
    first = evaluate(params)
    halved = jax.tree.map(lambda leaf: leaf / 2, params)
    assert evaluate(halved) == one_by_one(model, halved, split.batches) != first
    assert split.made == made
