"""What a person reads of a run: speeds, shares of time, and when they are shown."""

import jax.numpy as jnp
import pytest

from tformer_jax.train import meter
from tformer_jax.train.meter import Meter
from tformer_jax.train.progress import Figures


class Clock:
    """A clock that tests set."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(meter, "time", found)
    return found


def step(loss: float, labels: float) -> dict:
    return {"loss": jnp.float32(loss), "labels": jnp.float32(labels), "grad_norm": jnp.float32(2.0)}


def test_means_are_by_label_and_shares_by_time(clock):
    found = Meter(tokens=1000, seconds=50.0, data_wait_seconds=1.0)
    clock.now += 4
    found.add(step(1.0, 30), 40, waited=0.75)
    found.add(step(2.0, 10), 20, waited=0.25)
    read = found.read()
    assert read == {"loss": 1.25, "grad_norm": 2.0, "tokens_per_second": 15.0, "data_wait_percent": 25.0}
    assert found.totals() == {"tokens": 1060, "seconds": 54.0, "data_wait_seconds": 2.0}


def test_what_lies_before_a_restart_does_not_count(clock):
    found = Meter()
    clock.now += 5
    found.add(step(1.0, 1), 10, waited=5.0)
    found.restart()
    clock.now += 2
    found.add(step(1.0, 1), 10, waited=0.5)
    assert found.read()["data_wait_percent"] == 25.0


def test_waiting_is_shown_from_five_percent_on():
    assert "waiting" not in str(Figures(1, 1.0, 1e-3, 10.0, 5.0))
    assert "7 % waiting for data" in str(Figures(1, 1.0, 1e-3, 10.0, 7.2))
