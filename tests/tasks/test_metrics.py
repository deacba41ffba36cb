"""Metrics of other code and of programs, by hand arithmetic; sacreBLEU's are in `test_scores.py`."""

import dataclasses
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import score_texts
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ConfigError, DataConfig, EvalConfig, ModelConfig, TrainConfig, kinds
from tformer_jax.config.metrics import Metric, build_metric, lower_is_better
from tformer_jax.inference.risk import Utility
from tformer_jax.tasks.evaluators.likelihood import Losses, Measured
from tformer_jax.tasks.evaluators.perplexity import PerplexityEvaluator
from tformer_jax.tasks.evaluators.scores import measure_texts
from tformer_jax.train.monitor import BestMetric

OUTPUTS = ["ab", "abc", ""]
REFERENCES = [("abcd", "a"), ("abc",), ("äöü",)]
ECHO = "import json, sys; rows = [json.loads(line) for line in sys.stdin]; "


@pytest.fixture
def length_difference(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "outside")
    kinds.import_modules(["length_difference"])
    yield
    sys.modules.pop("length_difference")
    kinds.METRICS.pop("length_difference")


def running(code: str, name: str = "command", **settings) -> Config:
    """Returns a config with a metric that runs a Python program."""
    command = shlex.join([sys.executable, "-c", code])
    return Config(eval=EvalConfig(metrics=(name,), command=command, **settings))


def scores_of(cfg: Config, name: str = "command") -> list[float]:
    return list(build_metric(cfg.eval, name, "en").score_texts(["x", "y", "z"], OUTPUTS, REFERENCES))


@pytest.mark.usefixtures("length_difference")
def test_a_function_of_other_code_is_a_metric():
    cfg = Config(eval=EvalConfig(metrics=("length_difference",)))
    actual = score_texts(OUTPUTS, REFERENCES, cfg, "en")
    assert actual.metrics["length_difference"] == pytest.approx((1 + 0 + 3) / 3)
    assert list(build_metric(cfg.eval, "length_difference", "en").score_texts([], OUTPUTS, REFERENCES)) == [1, 0, 3]


@pytest.mark.usefixtures("length_difference")
def test_training_selects_by_a_metric_of_other_code():
    cfg = Config(eval=EvalConfig(metrics=("length_difference",)), train=TrainConfig(metric="length_difference"))
    best = BestMetric(cfg.train)
    assert best.score({"length_difference": 1.0}) > best.score({"length_difference": 2.0})
    with pytest.raises(ConfigError, match="train.metric='length_difference': must be"):
        Config(train=TrainConfig(metric="length_difference"))


def test_which_metrics_are_lower_for_better_outputs():
    lower = {name for name in kinds.METRICS if lower_is_better(f"{name}:to-en")}
    assert lower == {"ter", "off_target", "command_error"}
    assert lower_is_better("perplexity") and not lower_is_better("accuracy")


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ([1.0], "'mine' has 1 scores of 3 outputs"),
        ([1.0, float("nan"), 2.0], "'mine' has a score that is not finite, for the output 'abc'"),
        (["a", "b", "c"], "'mine' returns something else than a number for each output"),
    ],
)
def test_a_metric_has_a_finite_score_of_each_output(scores, problem, monkeypatch):
    monkeypatch.setitem(kinds.METRICS, "mine", lambda *_: scores)
    cfg = Config(eval=EvalConfig(metrics=("mine",)))
    with pytest.raises(UserError, match=f"the metric {problem}"):
        score_texts(OUTPUTS, REFERENCES, cfg, "en")
    with pytest.raises(UserError, match="the metric 'mine' "):
        Utility("mine", "en").matrices(["x"], [["ab", "c"]])


def test_outputs_in_all_languages_are_scored_by_one_call(monkeypatch):
    calls = []

    def counted(sources, outputs, references):
        calls.append((sources, outputs, references))
        return [float(len(output)) for output in outputs]

    monkeypatch.setitem(kinds.METRICS, "counted", counted)
    metrics = {language: {"counted": build_metric(EvalConfig(), "counted", language)} for language in ("de", "en")}
    rows = measure_texts(metrics, ["de", "en", "de"], ["x", "y", "z"], OUTPUTS, REFERENCES)
    assert calls == [(["x", "y", "z"], OUTPUTS, REFERENCES)]
    assert [Metric.score(metrics["de"]["counted"], row["counted"]) for row in rows] == [2, 3, 0]


@pytest.mark.parametrize(
    "write", ["print(*values, sep='\\n')", "json.dump(values, sys.stdout, indent=1)"], ids=["lines", "json"]
)
def test_a_program_reads_texts_and_writes_scores(write):
    code = ECHO + "values = [len(row['output']) - len(row['references'][-1]) for row in rows]; " + write
    cfg = running(code)
    assert scores_of(cfg) == [1, 0, -3]
    actual = score_texts(OUTPUTS, REFERENCES, cfg, "en")
    assert actual.metrics["command"] == pytest.approx(-2 / 3)
    assert actual.signatures["command"] == f"command:{cfg.eval.command}"


def test_a_program_gets_its_arguments_without_a_shell():
    command = shlex.join([sys.executable, "-c", ECHO + "[print(len(argument)) for argument in sys.argv[1:]]"])
    cfg = Config(eval=EvalConfig(metrics=("command",), command=command + " $HOME *;x 'a b'"))
    assert scores_of(cfg) == [len(argument) for argument in ("$HOME", "*;x", "a b")]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; print('a\\nno weights', file=sys.stderr); sys.exit(3)", "ended with exit code 3: no weights$"),
        ("import sys; sys.exit(3)", "ended with exit code 3: nothing on the standard error$"),
        ("print(1)", "wrote 1 scores of 3 outputs"),
        ("print('nan 1 2'.replace(' ', chr(10)))", "wrote a score that is not finite"),
        ("print({})", "must write numbers, one per line or as a JSON list"),
        ("print('[1, [2], 3]')", "must write numbers, one per line or as a JSON list"),
    ],
)
def test_a_program_that_fails_is_one_sentence(code, problem):
    with pytest.raises(UserError, match=f"eval.command=.*: {problem}") as caught:
        scores_of(running(code))
    assert "\n" not in str(caught.value)


def test_ctrl_c_does_not_reach_a_program():
    assert os.getpgrp() not in scores_of(running(ECHO + "import os; print([os.getpgrp() for _ in rows])"))


@pytest.mark.slow
def test_a_program_that_does_not_end():
    with pytest.raises(UserError, match="did not end within eval.command_seconds=1"):
        scores_of(running("import time; time.sleep(60)", command_seconds=1))


def test_a_program_that_cannot_be_run():
    cfg = Config(eval=EvalConfig(metrics=("command",), command="no-such-program --x"))
    with pytest.raises(UserError, match="eval.command='no-such-program --x': cannot be run: No such file"):
        scores_of(cfg)


def test_settings_of_programs_that_contradict_others():
    with pytest.raises(ConfigError, match="eval.command=None: must name a program"):
        EvalConfig(metrics=("command_error",))
    with pytest.raises(
        ConfigError, match="eval.command='x': is used only by eval.metrics='command' or 'command_error'"
    ):
        EvalConfig(command="x")
    with pytest.raises(ConfigError, match="cannot be split into words: No closing quotation"):
        EvalConfig(metrics=("command",), command="a 'b")


def test_means_of_stored_scores_are_those_of_sums():
    metric = build_metric(EvalConfig(), "exact_match", "en")
    statistics = metric.statistics(["", ""], ["a", "b"], [("a",), ("c", "d")])
    np.testing.assert_array_equal(statistics, [[100, 1], [0, 1]])
    assert metric.score(statistics.sum(axis=0)) == 50


def test_bits_are_those_of_all_tokens_over_the_size_of_the_texts():
    """First tokens count with the mean loss; regression test: packed texts had them for nothing."""
    texts = ["a\u00e4", "\u6f22b"]
    for alone, unpredicted in ((False, 1), (True, 2)):
        for losses in ([2.0, 4.0, 6.0], [4.0] * 6):  # of 3 or 6 tokens
            sums = np.array([[sum(losses), 0, len(losses)]])
            measured = Measured(4.0, 0.0, Losses([], []), sums)
            metrics = PerplexityEvaluator(lambda _, it=measured: it, texts=iter(texts), alone=alone)(None).metrics
            bits = 4.0 * (len(losses) + unpredicted) / np.log(2)
            assert metrics["bits_per_byte"] == pytest.approx(bits / (3 + 4))
            assert metrics["bits_per_character"] == pytest.approx(bits / 4)
    assert lower_is_better("bits_per_byte")
    assert "bits_per_byte" not in PerplexityEvaluator(lambda _: measured)(None).metrics


def test_a_prefix_model_has_no_bits_per_byte():
    data = DataConfig(source="stdlib_text", batching="windows")
    model = ModelConfig(family="decoder_lm")
    Config(model=model, data=data, train=TrainConfig(metric="bits_per_byte"))
    with pytest.raises(ConfigError, match="train.metric='bits_per_byte': must be 'loss' for model.prefix_lm=True"):
        Config(model=dataclasses.replace(model, prefix_lm=True), data=data, train=TrainConfig(metric="bits_per_byte"))
