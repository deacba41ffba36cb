"""Gradients of sharded parameters are reduce-scattered: equal values, checked in the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, init_module, normal, rest_slow
from tests.parallel import test_experts as experts
from tests.parallel.hlo import collectives
from tests.parallel.test_presets import batch, config, set_up
from tformer_jax.config import ParallelConfig
from tformer_jax.nn import gathered
from tformer_jax.nn.linear import product
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh


@pytest.fixture
def on_cpus(monkeypatch):
    """Enables on CPUs what is otherwise enabled only on TPUs."""
    monkeypatch.setattr(gathered, "PLATFORMS", ("cpu",))


@pytest.mark.parametrize(("devices", "numbers"), [(4, 2), (8, 2), (128, 2), (256, 2), (7, 1), (1, 1)])
def test_stages_leave_each_device_its_shard(devices, numbers):
    """Simulation: device i starts with all parts and ends with part i, summed over all devices."""
    stages = gathered.stages(devices)
    assert len(stages) == numbers
    values = np.random.default_rng(0).integers(0, 9, (devices, devices))
    held = [list(row) for row in values]
    for groups in stages:
        after = [None] * devices
        for group in groups or [list(range(devices))]:
            total = np.sum([held[device] for device in group], axis=0)
            for place, part in enumerate(np.split(total, len(group))):
                after[group[place]] = list(part)
        held = after
    np.testing.assert_array_equal(np.ravel(held), values.sum(axis=0))


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}], ids=str)
@pytest.mark.parametrize("width", [0, 1])
def test_a_product_and_its_gradients(on_cpus, sizes, width):
    x, kernel, weights = normal(8, 4, 16), normal(16, 16, seed=1), normal(8, 4, 16, seed=2)
    mesh = make_mesh(ParallelConfig(**{"data": 1} | sizes))
    names = ("embed", "mlp") if width == 0 else ("mlp", "embed")
    where = rules.parameter_spec(names, (16, 16), mesh.shape, rules.RULES)
    where = jax.sharding.NamedSharding(mesh, where)

    def run(x, kernel):
        with rules.use_mesh(mesh):
            out, pull = jax.vjp(lambda x, kernel: product(x, kernel, names), x, kernel)
            return out, *pull(weights)

    program = jax.jit(run, in_shardings=(rules.batch_sharding(mesh), where)).lower(x, kernel).compile()
    sent = collectives(program.as_text())
    assert sum(each.kind == "reduce-scatter" for each in sent) == len(gathered.stages(sizes["fsdp"]))
    columns = {shape[-1] for each in sent if each.kind in ("all-gather", "reduce-scatter") for shape in each.shapes}
    assert columns == {16 // sizes.get("tensor", 1)}  # a kernel that is also split along its other axis stays split
    actual = program(jax.device_put(x, rules.batch_sharding(mesh)), jax.device_put(kernel, where))
    rows, d_rows = np.float64(x).reshape(-1, 16), np.float64(weights).reshape(-1, 16)
    expected = rows @ np.float64(kernel), d_rows @ np.float64(kernel).T, rows.T @ d_rows
    for each, other in zip(actual, expected, strict=True):
        assert_close(jnp.reshape(each, other.shape), other, 1e-6)


@pytest.mark.parametrize("sizes", rest_slow([{"fsdp": 4, "expert": 2}, {"fsdp": 8}], 0), ids=str)
def test_experts(on_cpus, sizes):
    module, x = experts.mixture(moe={"experts_per_token": 2}), normal(experts.B, experts.T, experts.D)
    experts.assert_same_on(make_mesh(ParallelConfig(**sizes)), module, init_module(module, x), x)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "preset"), [("decoder_lm", "fsdp+tp"), ("seq2seq", "fsdp")])
def test_a_train_step(on_cpus, kind, preset):
    """Gradients of tied embeddings, one look-up and every matrix equal those of one device."""
    steps = {}
    for name, devices in ((preset, 8), ("dp", 1)):
        cfg = config(kind, preset=name)
        mesh, state, step = set_up(cfg, devices)
        rows = jax.device_put(batch(cfg, 0), rules.batch_sharding(mesh))
        text = step.lower(state, rows).compile().as_text()
        steps[name] = jax.device_get(step(state, rows)), text
    (actual, text), (expected, _) = steps[preset], steps["dp"]
    assert sum(each.kind == "reduce-scatter" for each in collectives(text)) >= 4
    assert_close(actual[1].array, expected[1].array, 1e-5)
    for each, other in zip(jax.tree.leaves(actual[0].params), jax.tree.leaves(expected[0].params), strict=True):
        assert_close(each, other, 1e-4)
