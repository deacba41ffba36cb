"""Learning curves of records."""

import itertools
import json

from tformer_jax.runs import curves


def write(run, records):
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_evaluations_have_the_tokens_of_their_step(tmp_path):
    train = [{"step": step, "group": "train", "loss": 1 / 3, "tokens": 10 * step, "lr": 1.0} for step in (1, 2, 3)]
    validation = [{"step": step, "group": "validation", "loss": None, "bleu": 2.0} for step in (2, 3)]
    write(tmp_path, [*train[:2], validation[0], train[2], validation[1], {"step": 3, "group": "test", "loss": 9.0}])
    assert curves.summarize_curves(tmp_path) == {
        "train": {"step": [1, 2, 3], "tokens": [10, 20, 30], "loss": [0.333333] * 3},
        "validation": {"step": [2, 3], "tokens": [20, 30], "loss": [None, None], "bleu": [2.0, 2.0]},
    }


def test_evaluations_between_records_have_interpolated_tokens(tmp_path):
    train = [{"step": step, "group": "train", "loss": 1.0, "tokens": 10 * step} for step in (4, 8)]
    write(tmp_path, [{"step": step, "group": "validation", "loss": 1.0} for step in (2, 5, 8)] + train)
    assert curves.summarize_curves(tmp_path)["validation"]["tokens"] == [20, 50, 80]


def test_long_curves_keep_their_ends(tmp_path):
    write(tmp_path, [{"step": step, "group": "train", "loss": 1.0} for step in range(1, 1001)])
    steps = curves.summarize_curves(tmp_path)["train"]["step"]
    assert (len(steps), steps[0], steps[-1]) == (curves.MAX_POINTS, 1, 1000)
    assert {b - a for a, b in itertools.pairwise(steps)} == {10, 11}


def test_a_run_without_records_has_empty_curves(tmp_path):
    assert curves.summarize_curves(tmp_path) == {"train": {}, "validation": {}}
    write(tmp_path, [])
    assert curves.summarize_curves(tmp_path) == {"train": {}, "validation": {}}
