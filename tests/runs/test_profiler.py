"""Traces of steps: which ones, and a remark where too few are left."""

from pathlib import Path

import jax
import pytest

from tformer_jax.runs import profiler


@pytest.mark.parametrize("wanted", [True, False])
def test_five_steps_are_traced_after_ten(monkeypatch, wanted):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append((step, folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append((step, "stop")))
    traced = profiler.Profiler(Path("profile"), first_step=3, wanted=wanted)
    for step in range(4, 30):
        traced.after_step(step, ())
    traced.close()
    assert calls == ([(13, "profile"), (18, "stop")] if wanted else [])


@pytest.mark.parametrize(
    ("left", "problem"),
    [(15, None), (14, "an incomplete trace: 14"), (10, "no trace: 10 steps are"), (1, "no trace: 1 step is")],
)
def test_a_trace_that_is_not_complete_is_announced(left, problem):
    said = profiler.Profiler(Path("profile"), first_step=3, wanted=True).shortage(3 + left)
    assert said is None if problem is None else problem in said
    assert profiler.Profiler(Path("profile"), first_step=3, wanted=False).shortage(3 + left) is None
