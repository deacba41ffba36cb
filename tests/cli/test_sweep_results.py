"""Results of sweeps: what is read of runs, what is compared, and how it is shown and recorded."""

import argparse
import json

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import sweep
from tformer_jax.config import Config, DataConfig


def test_validation_metrics_are_those_of_the_tested_weights(tmp_path):
    """Those of a run whose result has them, else the last ones of the run."""
    for name, validation in (("seed=0", {}), ("seed=1", {"validation": {"loss": 1.0}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({"tokens": 6, "seconds": 2, "test": {}, **validation}))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "group": "validation", "loss": 3.0}')
    actual = sweep.read_results(tmp_path, [("seed=0",), ("seed=1",)])
    assert [result["validation"] for result in actual.values()] == [{"loss": 3.0}, {"loss": 1.0}]
    assert {result["tokens_per_second"] for result in actual.values()} == {3.0}


@pytest.mark.parametrize(
    ("setting", "changed", "refused"),
    [
        ({}, "train", True),
        ({}, "test", True),
        ({"transforms": ("case",)}, "train", False),
        ({"transforms": ("case",)}, "test", True),
        ({"train": ("other.txt",)}, "train", False),
        ({"train": ("other.txt",)}, "validation", True),
    ],
)
def test_runs_of_other_data_are_not_compared(setting, changed, refused, tmp_path):
    """The held-out examples of all runs are the same, and the training examples of runs with equal settings of data."""
    data = {"source": "tsv", "train": ("train.tsv",), "validation": ("held.tsv",), "tokenizer": "bpe"}
    configs = {
        ("seed=0",): Config(data=DataConfig(**data)),
        ("seed=1",): Config(seed=1, data=DataConfig(**data | setting)),
    }
    for number in range(2):
        (folder := tmp_path / f"seed={number}").mkdir()
        (folder / "result.json").write_text("{}")
        facts = {
            f"the number of {split} examples": number * (split == changed) for split in ("train", "validation", "test")
        }
        (folder / "corpus.json").write_text(json.dumps(facts))
    if refused:
        problem = f"seed=0 and .*seed=1 had different data: the number of {changed} examples is 0 and 1; remove the run"
        with pytest.raises(UserError, match=problem):
            sweep.check_same_data(tmp_path, configs)
    else:
        sweep.check_same_data(tmp_path, configs)


@pytest.mark.parametrize(
    ("width", "shown"), [(70, {"bleu"}), (90, {"loss", "bleu", "chrf"}), (None, {"loss", "bleu", "chrf"})]
)
def test_a_narrow_terminal_shows_the_metric_alone(width, shown, monkeypatch, capsys):
    """Without a terminal, as in a pipe, all metrics are shown."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    means = {"loss": 2.5, "bleu": 20.0, "chrf": 40.0}
    group = {"settings": ("seed=0",), "seeds": 1, "parameters": 1000, "tokens_per_second": 10.0, "mean": means}
    group |= {"interval": dict.fromkeys(means), "at_equal_seconds": {"mean": 19.0, "interval": None}}
    actual = {"groups": [group], "metric": "bleu", "equal_seconds": 7.0, "runs": [{}]}
    sweep.print_results(argparse.Namespace(record=None, plot=None), actual)
    output = capsys.readouterr().out
    assert {name for name in means if f" {name} " in output.replace("validation bleu", "")} == shown
    assert "20" in output and "19" in output


def test_a_record_is_written_before_it_is_shown(tmp_path, monkeypatch, capsys):
    """Groups with other metrics have empty cells; an error in the table or the plot loses no record."""
    monkeypatch.setenv("COLUMNS", "200")
    means = {"x=1": {"bleu": 20.0}, "x=2": {"bleu": 30.0, "unknown_outputs": 4.5}}
    facts = {"seeds": 1, "parameters": 8, "tokens_per_second": 1.0}
    groups = [{"settings": (x,), "mean": mean, "interval": dict.fromkeys(mean)} | facts for x, mean in means.items()]
    actual = {"groups": groups, "metric": "bleu", "equal_seconds": None, "runs": [{}, {}]}
    options = argparse.Namespace(record=tmp_path / "record.json", plot=None)
    sweep.print_results(options, actual)
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[4:]] for row in rows] == [["20", "no value"], ["30", "4.5"]]
    monkeypatch.setattr(sweep, "result_table", None)
    with pytest.raises(TypeError):
        sweep.print_results(options, {**actual, "runs": []})
    assert json.loads((tmp_path / "record.json").read_text())["runs"] == []
