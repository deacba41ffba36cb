"""Likelihood of a split: sums over all batches, for any number of pending batches, and caching of batches."""

import jax
import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, build, rest_slow, tiny
from tformer_jax.config import kinds
from tformer_jax.data.corpora import DataError
from tformer_jax.special_tokens import IGNORED
from tformer_jax.tasks.evaluators import likelihood
from tformer_jax.tasks.evaluators.likelihood import Likelihood


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
    loss, hits, count = sum(np.float64(likelihood._sums(model, params, batch)).sum(axis=0) for batch in batches)
    return loss / count, 100 * hits / count


@pytest.mark.parametrize("count", [1, likelihood.MAX_PENDING_BATCHES, 3 * likelihood.MAX_PENDING_BATCHES])
def test_sums_do_not_depend_on_the_number_of_pending_batches(count):
    model, params = build(tiny("decoder_lm"))
    split = Counted(count)
    *actual, losses, _ = Likelihood(model, split)(params)
    assert actual == pytest.approx(one_by_one(model, params, split.batches))
    assert losses.labels == [4] * 2 * count
    logits = apply(model, params, split.batches[-1]["tokens"])
    log_p = np.log(oracles.softmax(np.float64(logits)))
    expected = -np.take_along_axis(log_p, split.batches[-1]["targets"][..., None], axis=-1)[..., 0].sum(axis=1)
    np.testing.assert_allclose(losses.nll[-2:], expected, rtol=1e-5)


@pytest.mark.parametrize("family", rest_slow(["masked_lm", "decoder_lm"], 1))
def test_chunks_of_logits_give_the_same_sums(family):
    """Five positions in chunks of three; the logits of all positions are never in memory."""
    model, params = build(tiny(family))
    draw = np.random.default_rng(0)
    tokens = draw.integers(3, 11, (2, 5)).astype(np.int32)
    targets = np.where(draw.random((2, 5)) < 0.7, tokens, IGNORED).astype(np.int32)
    batch = {"tokens": tokens, kinds.load(kinds.FAMILIES, family).labels: targets}
    np.testing.assert_allclose(likelihood._sums(model, params, batch, 3), likelihood._sums(model, params, batch), 1e-6)
    program = str(jax.make_jaxpr(lambda params: likelihood._sums(model, params, batch, 3))(params))
    assert "f32[2,3,11]" in program and "f32[2,5,11]" not in program


def test_rows_without_labels_are_dropped_and_many_are_joined(monkeypatch):
    monkeypatch.setattr(likelihood, "MAX_PARTS", 2)
    nll, labels = np.array([1.0, 0.0, 2.0, 4.0, 8.0]), np.array([1.0, 0.0, 1.0, 2.0, 2.0])
    assert likelihood.in_parts(nll, labels) == likelihood.Losses([3.0, 12.0], [2, 4])
    assert likelihood.in_parts(nll[:2], labels[:2]) == likelihood.Losses([1.0], [1])


@pytest.mark.parametrize("batches", [0, 1])
def test_a_split_without_labels_is_refused(batches):
    model, params = build(tiny("decoder_lm"))
    split = Counted(batches)
    for batch in split.batches:
        batch["targets"] = np.full_like(batch["targets"], IGNORED)
    with pytest.raises(DataError, match="the split has no token to predict"):
        Likelihood(model, split)(params)


@pytest.mark.parametrize(("room", "made"), [(2**20, 1), (100, 2)])
def test_batches_of_a_small_split_are_cached(monkeypatch, room, made):
    monkeypatch.setattr(likelihood, "CACHED_BYTES", room)
    model, params = build(tiny("decoder_lm"))
    split = Counted(3)
    evaluate = Likelihood(model, split)
    first = evaluate(params)
    halved = jax.tree.map(lambda leaf: leaf / 2, params)
    second = evaluate(halved)
    assert second[:2] == pytest.approx(one_by_one(model, halved, split.batches))
    assert second[0] != first[0]
    assert split.made == made
