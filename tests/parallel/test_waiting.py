"""No operation of a train step waits for threads that a collective of another device holds.

XLA for CPUs runs all virtual devices on one pool of threads. A call to LAPACK waits there for tasks of its own, and
never ends if the remaining threads wait for this device in an all-reduce.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import rest_slow, tiny
from tformer_jax.config import Config, DataConfig, OptimConfig, ParallelConfig, TrainConfig, kinds
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import jitted, make_train_step

ROWS, T = 8, 128
SIZES = {"dim": 64, "num_heads": 4, "ffn_dim": 128, "max_length": T}
MODELS: dict[str, dict[str, Any]] = {
    "gated_delta": {"attention": "gated_delta"},
    "experts": {"ffn": "moe"},
    "mla": {"attention": "mla", "position": "rotary", "mla": {"latent_dim": 16, "rotary_dim": 8}},
    "blockwise": {"attention_backend": "blockwise"},
    "window": {"layer_pattern": ("window",), "window": 16},
    "multi_head": {"position": "rotary"},
}
CASES = [(name, "adamw") for name in MODELS] + [
    ("multi_head", name) for name in kinds.OPTIMIZERS if name not in ("adamw", "python")
]
ALLOWED = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
"""Calls that only annotate a program."""


def config(model: str, optimizer: str) -> Config:
    return Config(
        model=tiny("decoder_lm", **SIZES, **MODELS[model]),
        data=DataConfig(source="stdlib_text", batching="windows", window=T),
        optim=OptimConfig(optimizer=optimizer, schedule="constant", learning_rate=1e-3, clip_norm=1.0),
        train=TrainConfig(),
        parallel=ParallelConfig(),
    )


def set_up(cfg: Config, devices: int) -> tuple[Any, Any, Any, Any]:
    """Returns a mesh, the jitted step, and the initial state as shapes and as a function that creates it."""
    mesh = make_mesh(cfg.parallel, jax.devices()[:devices])
    with rules.use_mesh(mesh):
        model = registry.build(cfg.model, train=True)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    step = make_train_step(model, optimizer, cfg)
    start = state.abstract(model, optimizer, cfg, mesh)
    return mesh, jitted(step, start, mesh), start, lambda: state.create(model, optimizer, cfg, mesh)


def batch(cfg: Config) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    family = cfg.model.model_class
    return {name: draw.integers(4, 11, (ROWS, T)).astype(np.int32) for name in (*family.inputs, family.labels)}


def losses(cfg: Config, devices: int) -> list[float]:
    """Returns the losses of three steps."""
    mesh, step, _, create = set_up(cfg, devices)
    current, rows = create(), jax.device_put(batch(cfg), rules.batch_sharding(mesh))
    values = []
    for _ in range(3):
        current, metrics = step(current, rows)
        values.append(float(metrics["loss"]))
    return values


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow({"-".join(case): case for case in CASES}, 1))
def test_steps_call_no_library(case):
    cfg = config(*case)
    mesh, step, start, _ = set_up(cfg, 2)
    where = rules.batch_sharding(mesh)
    rows = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for name, x in batch(cfg).items()}
    assert set(re.findall(r"custom_call @(\w+)", step.lower(start, rows).as_text())) <= ALLOWED


def losses_in_a_process(devices: int, cases: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Returns the losses of each case, from a process that is killed if it does not end."""
    program = (
        "import json; from tests.parallel.test_waiting import config, losses; "
        f"print(json.dumps([losses(config(*case), {devices}) for case in {cases}]))"
    )
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-c", program]
    done = subprocess.run(arguments, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(map(str, cases), json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("devices", "cases"), [(2, CASES), (8, CASES[:1])])
def test_steps_end_on_several_devices(devices, cases):
    """Regression test: the gated delta rule solved triangular systems by LAPACK, and its first step never ended."""
    expected = losses_in_a_process(1, cases)
    for case, values in losses_in_a_process(devices, cases).items():
        np.testing.assert_allclose(values, expected[case], rtol=1e-5, err_msg=case)
