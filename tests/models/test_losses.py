"""Cross-entropy, compared with its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import normal
from tformer_jax.models.losses import masked_cross_entropy, sum_over_chunks
from tformer_jax.special_tokens import IGNORED

LOGITS = 3 * normal(2, 4, 7)
LABELS = np.array([[0, 6, IGNORED, 3], [IGNORED, 2, 2, IGNORED]], np.int32)
cross_entropy = jax.jit(masked_cross_entropy, static_argnames="label_smoothing")


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_equals_the_definition(smoothing):
    counted = LABELS != IGNORED
    target = (1 - smoothing) * np.eye(7)[LABELS[counted]] + smoothing / 7
    expected = -(target * np.log(oracles.softmax(np.float64(LOGITS)[counted]))).sum()
    nll = -np.log(oracles.softmax(np.float64(LOGITS)[counted]))[np.arange(5), LABELS[counted]].sum()
    sums = cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)
    assert float(sums.loss) == pytest.approx(expected, rel=1e-6)
    assert float(sums.nll) == pytest.approx(nll, rel=1e-6)
    assert int(sums.labels) == 5


@pytest.mark.long
def test_rows_that_pad_the_vocabulary_get_no_smoothing():
    """But they count in the normalizer, as in published models: without smoothing, nothing changes."""
    smoothing, tokens, labels = 0.1, 5, np.minimum(LABELS, 4)
    counted = labels != IGNORED
    spread = np.arange(7) < tokens
    target = (1 - smoothing) * np.eye(7)[labels[counted]] + smoothing / tokens * spread
    log_p = np.log(oracles.softmax(np.float64(LOGITS)[counted]))
    actual = masked_cross_entropy(LOGITS, labels, label_smoothing=smoothing, smoothed=tokens)
    assert float(actual.loss) == pytest.approx(-(target * log_p).sum(), rel=1e-6)
    plain = masked_cross_entropy(LOGITS, labels)
    assert float(actual.nll) == float(plain.nll) == float(masked_cross_entropy(LOGITS, labels, smoothed=tokens).loss)


def test_by_hand():
    # softmax([0, log 3]) = [1/4, 3/4]
    sums = cross_entropy(jnp.array([[0.0, np.log(3)]]), jnp.array([0]))
    assert float(sums.loss) == pytest.approx(np.log(4), rel=1e-6)
    assert int(sums.labels) == 1


def test_ignored_labels_have_no_gradient():
    gradient = jax.grad(lambda logits: masked_cross_entropy(logits, LABELS, label_smoothing=0.1)[0])
    grad = jax.jit(gradient)(LOGITS)
    np.testing.assert_array_equal(np.abs(grad).sum(-1) > 0, LABELS != IGNORED)


def test_without_counted_labels_the_sums_are_zero():
    sums = cross_entropy(LOGITS, np.full_like(LABELS, IGNORED))
    assert [float(value) for value in sums] == [0.0] * len(sums)


def test_low_precision_logits_are_summed_in_float32():
    logits = LOGITS.astype(jnp.bfloat16)
    actual = cross_entropy(logits, LABELS).loss
    assert actual.dtype == jnp.float32
    assert float(actual) == float(cross_entropy(logits.astype(jnp.float32), LABELS).loss)


def test_label_smoothing_equals_the_annotated_transformer():
    """Its loss, KLDiv(smoothed || model), differs from the cross-entropy by the entropy of the smoothed labels."""
    smoothing, counted = 0.1, LABELS != IGNORED
    target = (1 - smoothing) * np.eye(7)[LABELS[counted]] + smoothing / 7

    def divergence(logits):
        return (target * (np.log(target) - jax.nn.log_softmax(logits[counted]))).sum()

    entropy = -(target * np.log(target)).sum()

    def loss(logits):
        return masked_cross_entropy(logits, LABELS, label_smoothing=smoothing).loss

    assert float(loss(LOGITS)) == pytest.approx(float(divergence(LOGITS)) + entropy, rel=1e-6)
    actual, expected = (jax.jit(jax.grad(function))(LOGITS) for function in (loss, divergence))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_z_is_the_square_of_the_normalizer():
    counted = LABELS != IGNORED
    expected = (np.log(np.exp(np.float64(LOGITS)).sum(-1)[counted]) ** 2).sum()
    assert float(cross_entropy(LOGITS, LABELS).z) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ignored", [-1, -100])
def test_negative_labels_are_ignored(ignored):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 200)), jnp.float32)
    sums = cross_entropy(logits, jnp.array([[4, ignored, 9]]))
    expected = -sum(np.log(oracles.softmax(np.float64(logits[0, t])))[label] for t, label in ((0, 4), (2, 9)))
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-6)
    assert sums.labels == 2


def test_labels_beyond_the_classes_give_nan():
    assert np.isnan(cross_entropy(jnp.zeros((1, 1, 5)), jnp.array([[5]])).loss)


@pytest.mark.parametrize(("chunk", "positions"), [(20, 9), (8, 5), (3, 3)])
def test_chunks_hold_no_more_positions_than_needed(chunk, positions):
    shapes = []

    def sums(x, labels):
        shapes.append((x.shape, labels.shape))
        return x.sum() + (labels != IGNORED).sum()

    total = sum_over_chunks(sums, jnp.ones((2, 9, 4)), jnp.zeros((2, 9), jnp.int32), chunk)
    assert set(shapes) == {((2, positions, 4), (2, positions))}
    assert total == 2 * 9 * 5


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_chunks_without_labels_are_skipped(share):
    """As many are computed as the row with the most labels needs; the sum is that over all positions with a label."""
    draw = np.random.default_rng(3)
    labels = np.where(draw.random((4, 21)) < share, 2, IGNORED)
    x, computed = normal(4, 21, 5), []

    def sums(x, labels):
        jax.debug.callback(computed.append, (labels >= 0).sum())
        return {"rows": jnp.where(labels[..., None] >= 0, x**2, 0).sum(axis=(1, 2))}

    def total(x):
        return sum_over_chunks(sums, x, jnp.asarray(labels), 4)

    rows = jax.jit(total)(x)["rows"]
    jax.effects_barrier()
    wanted = (np.float64(x) ** 2).sum(axis=2, where=labels[..., None] >= 0).sum(axis=1)
    np.testing.assert_allclose(rows, wanted, rtol=1e-6)
    assert len(computed) == -(-(labels >= 0).sum(axis=1).max() // 4)
    assert sum(computed) == (labels >= 0).sum()
    gradient = jax.jit(jax.grad(lambda x: total(x)["rows"].sum()))(x)
    np.testing.assert_allclose(gradient, np.where(labels[..., None] >= 0, 2 * x, 0), rtol=1e-6)
