"""Downsampling, smoothing's input and CSV, against hand arithmetic."""

import csv
import io

import numpy as np
import pytest

from tformer_jax.report.series import Series, bucket_means, downsample_indices, to_csv

NAN = float("nan")


def test_short_lines_are_kept_whole():
    assert downsample_indices(np.array([3.0, NAN, 1.0]), limit=3).tolist() == [0, 1, 2]
    assert bucket_means(np.array([3.0, 1.0]), limit=2).tolist() == [3.0, 1.0]


def test_two_buckets_by_hand():
    """A limit of 8 makes two buckets of six points; three points are kept of each, and both ends."""
    values = np.array([1.0, 9.0, 2.0, 3.0, 4.0, 5.0, -7.0, 5.0, 6.0, 6.0, 7.0, 7.0])
    assert downsample_indices(values, limit=8).tolist() == [0, 1, 6, 10, 11]
    assert bucket_means(values, limit=8).tolist() == [4.0, 4.0, 4.0, 4.0, 4.0]
    values[8:] += 6
    assert bucket_means(values, limit=8).tolist() == [4.0, 4.0, 8.0, 8.0, 8.0]
    values[2] = NAN
    assert downsample_indices(values, limit=8).tolist() == [0, 1, 2, 6, 10, 11]


@pytest.mark.parametrize("spike", [1, 4321, 9998])
def test_a_spike_of_one_step_is_kept(spike):
    values = np.sin(np.arange(10_000) / 700)
    values[spike] = 50.0
    values[spike // 2] = -50.0
    remaining = downsample_indices(values, limit=300)
    assert len(remaining) <= 300
    assert (np.diff(remaining) > 0).all()
    assert {0, spike, spike // 2, 9999} <= set(remaining.tolist())


def test_a_gap_is_kept_however_short():
    values = np.ones(5000)
    values[2500] = NAN
    values[4000:4400] = NAN
    remaining = values[downsample_indices(values, limit=200)]
    assert np.isnan(remaining).sum() >= 2
    assert len(remaining) <= 200


def test_records_become_columns_and_csv():
    records = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "bleu": 3}]
    series = Series.from_records(records)
    assert series.steps.tolist() == [1, 2]
    np.testing.assert_array_equal(series.columns["loss"], [0.5, NAN])
    np.testing.assert_array_equal(series.columns["bleu"], [NAN, 3])
    assert (series.last("loss"), series.last("bleu"), series.last("chrf")) == (0.5, 3.0, None)
    rows = list(csv.DictReader(io.StringIO(to_csv(series.records()))))
    assert rows == [{"step": "1", "loss": "0.5", "bleu": ""}, {"step": "2", "loss": "", "bleu": "3"}]


def test_csv_quotes_what_outputs_may_hold():
    text = 'a "b",\n<c>'
    assert list(csv.DictReader(io.StringIO(to_csv([{"output": text}])))) == [{"output": text}]
