"""What users see of a run: rates, percentages of time, and when they are shown."""

import concurrent.futures
import functools
import json
import math
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest

from tformer_jax.config import Config, EvalConfig, TrainConfig
from tformer_jax.data.corpora import Corpus
from tformer_jax.runs import evaluations
from tformer_jax.runs.progress import Figures, TimeLeft, describe_classes, with_prefix
from tformer_jax.train import meter
from tformer_jax.train.meter import Meter, compile_seconds
from tformer_jax.train.step_metrics import StepMetrics, pack


class Clock:
    """A clock that tests set."""

    now, compiled = 100.0, 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    actual = Clock()
    for module in (meter, evaluations):
        monkeypatch.setattr(module, "time", actual)
        monkeypatch.setattr(module, "compile_seconds", lambda: actual.compiled)
    return actual


def step(loss: float, labels: float, tokens: float = 1.0, skipped: float = 0.0, **more: float) -> StepMetrics:
    values = {"loss": loss, "labels": labels, "tokens": tokens, "grad_norm": 2.0, "skipped": skipped, **more}
    return pack({name: jnp.float32(value) for name, value in values.items()})


def test_means_are_by_label_and_shares_by_time(clock):
    actual = Meter(tokens=1000, flops=7.0, seconds=50.0, data_wait_seconds=1.0)
    clock.now += 4
    actual.add(step(1.0, 30, nll=0.5, tokens=40), flops=6.0, waited=0.75)
    actual.add(step(2.0, 10, nll=1.5, tokens=20), flops=2.0, waited=0.25)
    actual.fetch_all()
    assert actual.read() == {
        "loss": 1.25,
        "nll": 0.75,
        "grad_norm": 2.0,
        "skipped_steps": 0.0,
        "tokens_per_second": 15.0,
        "flops_per_second": 2.0,
        "data_wait_percent": 25.0,
    }
    assert actual.totals() == {
        "tokens": 1060,
        "flops": 15.0,
        "seconds": 54.0,
        "data_wait_seconds": 2.0,
        "skipped_steps": 0,
    }


def test_time_before_a_restart_does_not_count(clock):
    actual = Meter()
    clock.now += 5
    actual.add(step(1.0, 1, tokens=10), waited=5.0)
    actual.restart()
    clock.now += 2
    actual.add(step(1.0, 1, tokens=10), waited=0.5)
    actual.fetch_all()
    assert actual.read()["data_wait_percent"] == 25.0


def test_the_time_of_compilation_is_in_no_rate_and_no_estimate(clock):
    clock.compiled = 50.0  # before training
    actual = Meter()
    clock.now, clock.compiled = clock.now + 12, clock.compiled + 10
    actual.add(step(1.0, 1, tokens=10), waited=1)
    actual.fetch_all()
    metrics = actual.read()
    assert (metrics["tokens_per_second"], metrics["data_wait_percent"]) == (5.0, 50.0)
    assert actual.seconds_per_step == 2.0
    clock.now += 3  # of the next interval, without a compilation
    actual.add(step(1.0, 1, tokens=12), waited=0)
    actual.fetch_all()
    assert actual.read()["tokens_per_second"] == 4.0
    assert actual.seconds_per_step == 2.5


def test_a_step_in_which_something_is_compiled_counts_as_the_others(clock):
    actual = Meter()
    for seconds, compiled in ((30, 9), (2, 0), (20, 7), (4, 0)):
        clock.now, clock.compiled = clock.now + seconds, clock.compiled + compiled
        actual.add(step(1.0, 1, tokens=9), waited=0)
    actual.fetch_all()
    assert actual.read()["tokens_per_second"] == 36 / 12
    assert actual.seconds_per_step == 3.0


def test_the_wait_of_a_step_in_which_something_is_compiled_is_left_out_with_its_time(clock):
    """Regression test: the start of loader processes was 300 % of the time, which left it out."""
    actual = Meter()
    for seconds, compiled, waited in ((30, 9, 20), (2, 0, 1), (4, 0, 0.5)):
        clock.now, clock.compiled = clock.now + seconds, clock.compiled + compiled
        actual.add(step(1.0, 1), waited=waited)
    actual.fetch_all()
    assert actual.read()["data_wait_percent"] == 25.0
    assert actual.totals()["data_wait_seconds"] == 21.5


@pytest.mark.parametrize(("step", "seconds"), [(9, 15.0), (10, 15.0), (11, 12.0), (25, 9.0)])
def test_the_time_left_includes_evaluations(clock, step, seconds):
    """Of 25 steps with an evaluation every 10; the last one took 3 s, and the test split has twice as many examples."""
    train = TrainConfig(steps=25, eval_every=10)
    corpus = Corpus([], range(100), range(40))
    experiment = types.SimpleNamespace(cfg=Config(train=train, eval=EvalConfig(examples=20)), corpus=corpus)

    class Timed(evaluations.Evaluations):
        _validators = ()

        def _evaluate(self, *_):
            clock.now, clock.compiled = clock.now + 8, clock.compiled + 5
            return {"loss": 1.0}

    actual = Timed(experiment, None, {}, 0, {})
    assert actual.seconds_left(step) is None
    actual.validate(step, None)
    assert actual.seconds_left(step) == seconds


def test_a_compilation_is_timed():
    before, size = compile_seconds(), jnp.ones(17)
    jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))(size)
    assert compile_seconds() > before


def test_compilations_of_several_threads_count_once():
    functions = [lambda x, n=n: functools.reduce(lambda y, _: jnp.sin(y) @ y, range(40), x) + n for n in range(3)]
    started, before = time.perf_counter(), compile_seconds()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(lambda function: jax.jit(function)(jnp.ones((9, 9))), functions))
    assert 0 < compile_seconds() - before <= time.perf_counter() - started


def test_compile_time_is_of_the_union_of_events():
    time_of_events = meter.CompileTime()
    for begin, end in ((1, 2), (4, 5), (3, 6), (5.5, 7), (6.5, 6.9), (8, 9)):
        time_of_events.add(begin, end)
    assert time_of_events.seconds == 1 + 4 + 1


def test_skipped_steps_are_counted_and_left_out():
    actual = Meter()
    actual.add(step(1.0, 30), waited=0)
    actual.add(step(math.nan, 10, skipped=1), waited=0)
    actual.fetch_all()
    read = actual.read()
    assert (read["loss"], read["skipped_steps"]) == (1.0, 1.0)
    actual.add(step(math.inf, 10, skipped=2), waited=0)
    actual.fetch_all()
    read = actual.read()
    assert math.isnan(read["loss"])
    assert read["skipped_steps"] == 1.0
    assert Meter(**actual.state()).skipped_steps == actual.totals()["skipped_steps"] == 2


def test_steps_before_a_checkpoint_count_after_it():
    whole, first = Meter(), Meter()
    for meter_ in (whole, first):
        meter_.add(step(1.0, 30), waited=0)
    first.fetch_all()
    resumed = Meter(**json.loads(json.dumps(first.state())))
    for meter_ in (whole, resumed):
        meter_.add(step(2.0, 10), waited=0)
        meter_.fetch_all()
    assert resumed.read()["loss"] == whole.read()["loss"] == 1.25


def test_metrics_that_a_resume_turns_on_or_off_are_means_of_the_steps_that_have_them():
    """Regression test: a resume without `train.log_norms` between two records of metrics ended with a KeyError."""
    with_norms, without = (step(1.0, 30, **norms) for norms in ({"param_norm/head": 3.0}, {}))
    for before, after in ((with_norms, without), (without, with_norms)):
        first = Meter()
        first.add(before, waited=0)
        first.fetch_all()
        resumed = Meter(**first.state())
        resumed.add(after, waited=0)
        resumed.fetch_all()
        assert resumed.read()["param_norm/head"] == 3.0


def test_the_noise_scale_is_a_ratio_of_means():
    actual = Meter()
    for squared, variance in ((1.0, 10.0), (3.0, 50.0)):
        actual.add(step(1.0, 1, gradient_squared=squared, gradient_variance=variance), waited=0)
    actual.fetch_all()
    read = actual.read()
    assert read["noise_scale"] == 15.0
    assert "gradient_squared" not in read


def shown(**changes: float) -> str:
    metrics = {
        "loss": 1.0,
        "learning_rate": 1e-3,
        "tokens_per_second": 1234.0,
        "flops_per_second": 5.5e12,
        "data_wait_percent": 0.0,
        "skipped_steps": 0.0,
    }
    return str(Figures(1, metrics | changes, 3 * 2**29, 11e12, 2000, TimeLeft(0.0, is_whole=True)))


def test_a_line_of_progress():
    expected = "loss 1.0000  lr 1.00e-03  1,234 tokens/s  5.5 TFLOP/s (50 %)  1.5 GiB  evaluation at 2,000"
    assert shown() == expected
    assert "3 steps skipped" in shown(skipped_steps=3.0)
    assert "1 step skipped" in shown(skipped_steps=1.0)


def test_the_time_left_says_whether_it_includes_evaluations():
    assert [str(TimeLeft(90.4, is_whole=whole)) for whole in (True, False)] == [
        "0:01:30 left",
        "more than 0:01:30 left",
    ]
    assert [str(TimeLeft(0.0, is_whole=whole)) for whole in (True, False)] == ["0:00:00 left", "evaluations left"]


def test_waiting_is_shown_from_five_percent_on():
    assert "waiting" not in shown(data_wait_percent=5.0)
    assert "7 % waiting for data" in shown(data_wait_percent=7.2)


def test_numbers_with_prefixes():
    assert [with_prefix(number) for number in (2.5e15, 1e12, 3.2e9, 4e6, 12.0)] == [
        "2.5 P",
        "1.0 T",
        "3.2 G",
        "4.0 M",
        "12 ",
    ]


def test_the_first_classes_are_named():
    assert describe_classes(None) == ""
    assert describe_classes(("neg", "pos")) == "2 classes (neg, pos), "
    assert describe_classes(tuple("abcdefg")) == "7 classes (a, b, c, d, e, ...), "


@pytest.mark.slow
def test_a_run_outlives_the_reader_of_its_output():
    """Regression test: rich ended the process, without a checkpoint."""
    program = (
        "import sys, time; from tformer_jax.runs.progress import ProgressView; view = ProgressView(steps=1)\n"
        "view.say('first'); sys.stdin.read(1); view.say('second'); view.say('third'); print('alive', file=sys.stderr)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes, text=True) as process:
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.write("x")
        process.stdin.close()
        assert process.stderr.read() == "alive\n"
    assert process.returncode == 0
