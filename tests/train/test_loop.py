"""The training loop by hand: its order, its end, and which batch a step that is not finite is explained by."""

import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from tformer_jax.train import loop
from tformer_jax.train.meter import Meter
from tformer_jax.train.monitor import NotFinite, SpikeDetector, StepMonitor
from tformer_jax.train.step_metrics import pack


class Batches:
    """Batches numbered from 1, each of which is waited for 1 s; the first one was waited for before the loop."""

    def __init__(self):
        self.numbers, self.waited = itertools.count(1), 1.0

    def __next__(self):
        self.waited += 1.0
        return {"number": np.array(next(self.numbers))}

    def take_waited(self) -> float:
        waited, self.waited = self.waited, 0.0
        return waited


def make_trainer(monkeypatch, broken=(), skipped=2) -> tuple[loop.Trainer, list]:
    """Returns a trainer whose state counts steps and whose steps `broken` are not finite, and its reports."""
    monkeypatch.setattr(loop, "training_flops", lambda cfg, batch: 10.0)
    reports, successive = (
        [],
        itertools.accumulate(itertools.count(1), lambda run, step: run + 1 if step in broken else 0, initial=0),
    )
    next(successive)

    def train_step(state, batch):
        number = int(batch["number"])
        assert number == state.step + 1
        values = {"loss": 1.0, "labels": 1.0, "tokens": 3.0, "grad_norm": 1.0, "skipped": float(next(successive))}
        return types.SimpleNamespace(step=number), pack({name: jnp.float32(value) for name, value in values.items()})

    report = lambda *event: reports.append(event)  # noqa: E731
    monitor = StepMonitor(SpikeDetector(), checked=0, max_skipped=skipped, report=report)
    start = types.SimpleNamespace(step=0)
    return loop.Trainer(None, train_step, start, Batches(), dict, meter=Meter(), monitor=monitor), reports


def test_actions_run_in_order_after_the_steps_that_they_are_due_after(monkeypatch):
    trainer, _ = make_trainer(monkeypatch)
    done = []
    actions = [
        (lambda step: True, lambda: done.append(("every", trainer.step, trainer.state.step))),
        (lambda step: step % 2 == 0, lambda: done.append(("even", trainer.step, trainer.state.step))),
    ]
    trainer.run(actions, lambda: trainer.step == 3)
    assert done == [("every", 1, 1), ("every", 2, 2), ("even", 2, 2), ("every", 3, 3)]
    trainer.run(actions, lambda: True)
    assert trainer.step == 3, "an ended run takes no step"


def test_finished_steps_are_counted_without_the_wait_before_the_loop(monkeypatch):
    trainer, reports = make_trainer(monkeypatch)
    trainer.run([], lambda: trainer.step == 5)
    assert trainer.monitor.checked == 3, "two steps may still be computed"
    trainer.check_all()
    totals = trainer.meter.totals()
    assert (trainer.monitor.checked, totals["tokens"], totals["flops"]) == (5, 15, 50.0)
    assert (totals["data_wait_seconds"], totals["skipped_steps"], reports) == (5.0, 0, [])


def test_a_run_ends_with_the_batch_of_the_step_that_is_not_finite(monkeypatch):
    trainer, reports = make_trainer(monkeypatch, broken=(2, 4, 5))
    with pytest.raises(NotFinite, match="2 consecutive steps up to step 5 had a non-finite loss or gradient") as ended:
        trainer.run([], lambda: False)
    assert (ended.value.step, int(ended.value.batch["number"])) == (5, 5)
    assert trainer.step == 7, "two later steps had been started"
    assert str(NotFinite(1, 5, {})) == "step 5 had a non-finite loss or gradient"
    assert [(step, kind) for step, kind, _ in reports] == [(2, "skipped"), (4, "skipped"), (5, "skipped")]
