"""Learning rates against the formulas, worked out by hand."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from tformer_jax.config import Config, ModelConfig, OptimConfig, TrainConfig
from tformer_jax.train import schedules


def rate(step: int, steps: int = 1000, **optim) -> float:
    cfg = Config(model=ModelConfig(dim=512), optim=OptimConfig(**optim), train=TrainConfig(steps=steps))
    return float(schedules.build(cfg)(step))


@pytest.mark.parametrize("t", [1, 2, 3999, 4000, 4001, 100_000])
def test_the_2017_formula(t):
    expected = 512**-0.5 * min(t**-0.5, t * 4000**-1.5)
    assert rate(t - 1, schedule="inverse_sqrt", warmup_steps=4000) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("t", "expected"),
    [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.1 + 0.9 * 0.5), (110, 0.1), (500, 0.1)],
)
def test_cosine(t, expected):
    settings = {"schedule": "cosine", "learning_rate": 1.0, "warmup_steps": 10, "final_fraction": 0.1}
    assert rate(t - 1, steps=110, **settings) == pytest.approx(expected, rel=1e-5)


def test_cosine_between_its_ends():
    progress = (30 - 10) / (110 - 10)
    expected = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
    settings = {"schedule": "cosine", "learning_rate": 1.0, "warmup_steps": 10, "final_fraction": 0.1}
    assert rate(29, steps=110, **settings) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("t", "expected"), [(1, 0.25), (4, 1.0), (5, 1.0), (900, 1.0)])
def test_constant(t, expected):
    assert rate(t - 1, schedule="constant", learning_rate=1.0, warmup_steps=4) == pytest.approx(expected)


@pytest.mark.parametrize(("t", "expected"), [(5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1), (500, 0.1)])
def test_linear(t, expected):
    settings = {"schedule": "linear", "learning_rate": 1.0, "warmup_steps": 10, "final_fraction": 0.1}
    assert rate(t - 1, steps=110, **settings) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("t", "expected"), [(5, 0.5), (10, 1.0), (85, 1.0), (97, 0.56), (110, 0.04), (500, 0.04)])
def test_warmup_stable_decay(t, expected):
    settings = {"schedule": "warmup_stable_decay", "learning_rate": 1.0, "warmup_steps": 10, "final_fraction": 0.04}
    # 100 steps after warm-up, the last 25 of which decline by 0.96: at 97 half of them, and half a step, are done
    expected = 1 - 0.96 * (97 - 85) / 25 if t == 97 else expected
    assert rate(t - 1, steps=110, decay_fraction=0.25, **settings) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cycles", [1, 2, 4, 5, 8, 10])
def test_each_cycle_restarts_at_the_peak(cycles):
    """Regression test: of 10 cycles in 200 steps, 6 of the restarts came one step late, because of rounding."""
    optim = OptimConfig(schedule="linear", learning_rate=1.0, warmup_steps=100, final_fraction=0.0, cycles=cycles)
    cfg, length = Config(optim=optim, train=TrainConfig(steps=300)), 200 // cycles
    rates = jax.jit(jax.vmap(schedules.build(cfg)))(np.arange(300))
    cycle = 1 - np.arange(length) / length
    np.testing.assert_allclose(rates[99:], [*np.tile(cycle, cycles), 0], atol=1e-5)


@pytest.mark.parametrize(("t", "expected"), [(10, 1.0), (35, 0.5), (59, 0.02), (60, 1.0), (85, 0.5), (110, 0.0)])
def test_restarts(t, expected):
    settings = {"schedule": "linear", "learning_rate": 1.0, "warmup_steps": 10, "final_fraction": 0.0, "cycles": 2}
    assert rate(t - 1, steps=110, **settings) == pytest.approx(expected, abs=1e-6)


def test_a_resumed_schedule_that_continues_with_another_rate_is_reported():
    """At step 1,000, the cosine has ended; with 2,000 steps, it is half done."""
    optim = OptimConfig(schedule="cosine", learning_rate=0.5, warmup_steps=1, final_fraction=0.0)
    short, long = (Config(optim=optim, train=TrainConfig(steps=steps)) for steps in (1000, 2000))
    sentence = "the schedule ends at step 2000, no longer at 1000: the learning rate continues with 2.50e-01 instead of"
    assert schedules.rate_change(short, long, 1000).startswith(sentence)
    assert schedules.rate_change(short, short, 1000) is None
    constant = [
        dataclasses.replace(each, optim=OptimConfig(schedule="constant", learning_rate=0.5)) for each in (short, long)
    ]
    assert schedules.rate_change(*constant, 1000) is None
