"""Intervals equal those of sacreBLEU's own classes; paired tests equal resamples counted by hand and are calibrated."""

import dataclasses
import math

import numpy as np
import pytest
import sacrebleu
from sacrebleu.metrics.base import Metric, Score, Signature
from sacrebleu.significance import PairedTest

from tests.helpers import rest_slow
from tests.report.folders import SIGNATURES, write_run
from tformer_jax.report import sections
from tformer_jax.report.bootstrap import bleu_of, estimates, ratio
from tformer_jax.report.run import load_all
from tformer_jax.tasks.classification import CLASSIFICATION
from tformer_jax.tasks.evaluators.directions import with_means
from tformer_jax.tasks.language_model import LANGUAGE_MODEL
from tformer_jax.tasks.translation import TRANSLATION


class Share(Metric):
    """The percentage of outputs that equal their reference, as a metric of sacreBLEU."""

    _SIGNATURE_TYPE = Signature

    def _check_sentence_score_args(self, hyp, refs):
        """Accepts everything."""

    def _aggregate_and_compute(self, stats):
        return self._compute_score_from_stats(np.array(stats).sum(0))

    def _compute_score_from_stats(self, stats):
        return Score("share", 100 * stats[0] / stats[1])

    def _preprocess_segment(self, sent):
        return sent

    def _extract_reference_info(self, refs):
        return {"refs": refs}

    def _compute_segment_statistics(self, hypothesis, ref_kwargs):
        return [float(hypothesis in ref_kwargs["refs"]), 1.0]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = load_all([write_run(folder / name, level=level) for name, level in (("a", 0.0), ("b", 0.15))])
    return [run.outputs["test"] for run in runs]


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("bleu", sacrebleu.BLEU()),
        ("chrf", sacrebleu.CHRF()),
        ("chrf++", sacrebleu.CHRF(word_order=2)),
        ("ter", sacrebleu.TER()),
        ("exact_match", Share()),
    ],
)
def test_equal_to_sacrebleu(outputs, name, metric):
    outputs = [dataclasses.replace(each, signatures={**SIGNATURES, "ter": "", "chrf++": ""}) for each in outputs]
    a, b = outputs
    named = [("a", a.texts), ("b", b.texts)]
    scores = PairedTest(named, {"it": metric}, [a.references], test_type="bs", n_samples=200)()[1]
    (expected,) = (actual for label, actual in scores.items() if label != "System")
    for mine, theirs in zip(estimates(outputs, TRANSLATION, resamples=200)[name], expected, strict=True):
        assert (mine.score, mine.mean, mine.half) == pytest.approx((theirs.score, theirs.mean, theirs.ci), rel=1e-5)
    assert estimates(outputs, TRANSLATION, resamples=200)[name][1].p_value < 0.5


def test_the_resamples_of_accuracy_by_hand():
    better, worse = np.array([True] * 6 + [False] * 2), np.array([True] * 3 + [False] * 5)
    first, second = ratio([100.0 * worse, 100.0 * better], np.ones(8), 100, 100.0)
    drawn = np.random.default_rng(12345).choice(8, size=(100, 8), replace=True)
    sampled = np.sort([100 * sum(worse[at] for at in row) / 8 for row in drawn])
    assert (first.score, second.score) == (37.5, 75.0)
    assert (first.low + first.high) / 2 == pytest.approx(sampled.mean())
    assert first.high - first.low == pytest.approx(sampled[97] - sampled[2])
    gaps = [100 * sum(int(better[at]) - int(worse[at]) for at in row) / 8 for row in drawn]
    assert second.p_value == (sum(abs(gap - 37.5) >= 37.5 for gap in gaps) + 1) / 101
    assert first.p_value is None


def test_intervals_stay_between_0_and_100_percent():
    low, high = (ratio([100.0 * (np.arange(40) < hits)], np.ones(40), 100, 100.0)[0] for hits in (1, 39))
    assert (low.low, high.high) == (0.0, 100.0)
    assert low.mean < low.half and high.mean + high.half > 100, "sacreBLEU's intervals are symmetric"


def test_a_system_does_not_differ_from_itself(outputs):
    actual = estimates([outputs[0], outputs[0]], TRANSLATION, resamples=100)
    assert list(actual) == ["bleu", "chrf", "exact_match"]
    assert all(second.score == first.score for first, second in actual.values())
    assert {second.p_value for _, second in actual.values()} == {1.0}


def test_the_resamples_of_a_loss_by_hand():
    labels, worse, better = np.array([4, 1, 3]), np.array([8.0, 1.0, 9.0]), np.array([4.0, 0.5, 6.0])
    first, second = ratio([worse, better], labels, resamples=100)
    drawn = np.random.default_rng(12345).choice(3, size=(100, 3), replace=True)
    sampled = np.sort([sum(worse[at] for at in row) / sum(labels[at] for at in row) for row in drawn])
    assert (first.score, second.score) == (18 / 8, 10.5 / 8)
    assert (first.mean, 2 * first.half) == pytest.approx((sampled.mean(), sampled[97] - sampled[2]))
    gaps = [sum(better[at] - worse[at] for at in row) / sum(labels[at] for at in row) for row in drawn]
    assert second.p_value == max((sum(abs(gap + 7.5 / 8) >= 7.5 / 8 for gap in gaps) + 1) / 101, 1 / 4)


def test_two_examples_prove_nothing():
    """Regression test: no resample of two equal differences differs, and the p-value was 0.001."""
    assert ratio([np.zeros(2), np.ones(2)], np.ones(2))[1].p_value == 0.5
    assert ratio([np.zeros(11), np.ones(11)], np.ones(11))[1].p_value == 1 / 1001


def test_losses_that_are_not_finite_prove_nothing():
    first, second = ratio([np.ones(3), np.array([2.0, math.nan, 2.0])], np.ones(3), resamples=100)
    assert (first.score, second.p_value) == (1.0, 1.0)
    shown = [sections.format_metric(second.score, "loss"), sections.format_interval(second, "loss")]
    shown += [
        sections.format_difference(second.score - first.score, "loss"),
        sections.format_metric(math.inf, "perplexity"),
    ]
    assert set(shown) == {sections.ABSENT}


@pytest.mark.slow
@pytest.mark.parametrize("pairs", rest_slow([400, 1000], 1))
def test_equal_systems_differ_as_rarely_as_the_level_says(pairs):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(pairs, 2, 100))
    p_values = np.array([ratio(list(pair), np.ones(100), resamples=200)[1].p_value for pair in noise])
    for level in (0.05, 0.2, 0.5):
        error = 3 * np.sqrt(level * (1 - level) / len(noise))
        assert np.mean(p_values <= level) == pytest.approx(level, abs=error + 0.01)


def test_scores_that_runs_stored_are_resampled_by_hand(outputs):
    """Those of metrics that the comparison cannot compute; values below 0 are possible."""
    size = len(outputs[0].texts)
    values = np.random.default_rng(1).normal([[-0.2], [0.1]], size=(2, size))
    rows = [[{"comet": value, "own": 1.0} for value in row] for row in values.tolist()]
    stored = [dataclasses.replace(each, metrics=row) for each, row in zip(outputs, rows, strict=True)]
    first, second = estimates(stored, TRANSLATION, resamples=100)["comet"]
    drawn = np.random.default_rng(12345).choice(size, size=(100, size), replace=True)
    sampled = values[:, drawn].mean(axis=2)
    assert (first.score, second.score) == pytest.approx(values.mean(axis=1).tolist())
    assert (first.mean, second.mean) == pytest.approx(sampled.mean(axis=1).tolist())
    assert first.low == first.mean - first.half < 0
    gaps, gap = sampled[1] - sampled[0], values[1].mean() - values[0].mean()
    assert second.p_value == (sum(abs(each - gap) >= abs(gap) for each in gaps) + 1) / 101
    unpaired = [stored[0], dataclasses.replace(outputs[1], metrics=[{"own": 1.0}] * size)]
    assert "comet" not in estimates(unpaired, TRANSLATION, resamples=10)


def test_means_are_over_the_directions_that_have_a_metric(tmp_path):
    """As in an evaluation; there is no mean if a metric of a direction cannot be computed again."""
    (run,) = load_all([write_run(tmp_path / "a", directions=("en-tlh", "en-de", "en-fr"))])
    plain = run.outputs["test"]
    rows = [{} if name == "en-tlh" else {"off_target": number % 7} for number, name in enumerate(plain.directions)]
    stored = dataclasses.replace(plain, metrics=rows)
    actual = estimates([stored, stored], TRANSLATION, resamples=10)
    parts = [{"off_target": actual[f"off_target:{name}"][0].score} for name in ("en-de", "en-fr")]
    expected = with_means({"en-tlh": {}, "en-de": parts[0], "en-fr": parts[1]}, ())
    assert actual["off_target"][0].score == pytest.approx(expected["off_target"])
    signatures = {f"bleu:{name}": SIGNATURES["bleu"] for name in ("en-de", "en-fr")}
    actual = estimates([dataclasses.replace(plain, signatures=signatures)], TRANSLATION, resamples=10)
    assert "bleu:en-de" in actual and not {"bleu", "bleu:en-tlh"} & {*actual}
    unpaired = dataclasses.replace(stored, metrics=[{"off_target": 1.0}] * len(rows))
    assert "off_target" not in estimates([stored, unpaired], TRANSLATION, resamples=10)


def test_which_metrics_a_family_has(outputs):
    assert list(estimates(outputs[:1], CLASSIFICATION, resamples=10)) == ["accuracy"]
    assert estimates(outputs[:1], LANGUAGE_MODEL, resamples=10) == {}
    parts = dataclasses.replace(outputs[0], nll=np.ones(3), labels=np.array([1, 2, 1]))
    assert list(estimates([parts, parts], LANGUAGE_MODEL, resamples=10)) == ["loss"]
    assert estimates([parts], CLASSIFICATION, resamples=10)["loss"][0].score == 0.75
    other = dataclasses.replace(parts, labels=np.array([2, 1, 1]))
    assert estimates([parts, other], LANGUAGE_MODEL, resamples=10) == {}


def test_the_tokenizer_is_that_of_the_signature():
    assert bleu_of(SIGNATURES).scorer.tokenizer.signature() == "13a"
    assert bleu_of({"bleu": "nrefs:1|tok:zh|smooth:exp"}).scorer.tokenizer.signature() == "zh"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sacrebleu, "BLEU", lambda tokenize, force: tokenize)
        for version, name in (("ja-mecab-0.996-IPA", "ja-mecab"), ("ko-mecab-0.996/ko-0.9.2-KO", "ko-mecab")):
            assert bleu_of({"bleu": f"nrefs:1|tok:{version}|smooth:exp"}).scorer == name
    assert bleu_of({}) is None
