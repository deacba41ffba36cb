"""The compiled train step: one program per shape, without copies or transfers, which may be compiled ahead."""

import re

import jax
import numpy as np
import pytest

from tests.helpers import assert_close, rest_slow
from tests.train.test_step import NORMS_AND_NOISE, batch, built, experiment, settings
from tformer_jax.config import ParallelConfig
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import state
from tformer_jax.train.step import compiling, jitted, make_train_step
from tformer_jax.train.step_metrics import fetch


@pytest.mark.slow
def test_the_moments_of_the_optimizer_are_updated_without_copies():
    cfg, mesh = settings(), make_mesh(ParallelConfig(data=1))
    model, optimizer, _ = built(cfg)
    current = state.create(model, optimizer, cfg, mesh)
    text = jitted(make_train_step(model, optimizer, cfg), current, mesh).lower(current, batch()).compile().as_text()
    assert "opt_state" in text
    assert not re.search(r" copy\(%state_opt_state", text)


@pytest.mark.slow
@pytest.mark.parametrize("devices", rest_slow([8, 1], 1))
def test_one_compilation_per_shape_and_no_transfers(devices):
    model, optimizer, _ = experiment()
    mesh = make_mesh(ParallelConfig(data=devices))
    current = state.create(model, optimizer, settings(), mesh)
    step = jitted(make_train_step(model, optimizer, settings()), current, mesh)
    for number in range(6):
        data = jax.device_put(batch(length=4 + number % 2, seed=number), rules.batch_sharding(mesh))
        if number > 1:
            with jax.transfer_guard("disallow"):
                current, _ = step(current, data)
        else:
            current, _ = step(current, data)
    assert step._cache_size() == 2


def test_the_first_call_uses_what_another_thread_compiled():
    compilations = []

    def count(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(seconds)

    step = jax.jit(lambda state, batch: state + batch["tokens"].sum())
    state, tokens = np.zeros(3, np.float32), {"tokens": np.ones((2, 5), np.int32)}
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        with compiling(step, jax.ShapeDtypeStruct(state.shape, state.dtype), lambda: tokens):
            pass
        ahead = len(compilations)
        step(state, tokens)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert ahead == len(compilations) == 1


def test_an_error_of_a_compilation_ahead_is_left_to_the_first_call():
    with compiling(jax.jit(lambda state, batch: state), np.zeros(3), lambda: {}["no batch"]):
        pass


@pytest.mark.long
def test_compiled_metrics_are_one_array():
    cfg = settings(train=NORMS_AND_NOISE)
    model, optimizer, step = built(cfg)
    mesh = make_mesh(ParallelConfig(data=1))
    current = state.create(model, optimizer, cfg, mesh)
    expected = jax.device_get(step(current, batch())[1])
    _, actual = jitted(make_train_step(model, optimizer, cfg), current, mesh)(current, batch())
    assert actual.array.shape == (len(expected),)
    assert set(actual) == set(expected)
    for name in expected:
        assert_close(actual[name], expected[name], 1e-6)
    assert fetch([actual, actual]) == [{name: float(actual[name]) for name in actual}] * 2
