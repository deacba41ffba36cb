"""A mixture of experts on every mesh equals a sum over all experts, and sends tokens instead of experts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests import oracles
from tests.helpers import assert_close, init_module, normal, rest_slow, shapes_of, tiny, with_settings
from tests.parallel import test_presets as presets
from tests.parallel.test_collectives import lowered, plain
from tformer_jax.config import ParallelConfig, kinds
from tformer_jax.nn import moe
from tformer_jax.nn.ffn import make_ffn
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh

B, T, D, E = 8, 6, 8, 8
REAL = np.arange(T) < np.array([T, 4, 0, 1, T, 5, 3, T])[:, None]
MESHES = {
    "expert=2,fsdp=2,tensor=2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "data=4,expert=2": {"data": 4, "expert": 2},
    "expert=8": {"expert": 8},
    "data=8": {"data": 8},
    "fsdp=8": {"fsdp": 8},
    "data=2,expert=2,sequence=2": {"data": 2, "expert": 2, "sequence": 2},
}
CHANGES = {
    "gated": {"moe": {"experts_per_token": 2}},
    "capacity": {"moe": {"experts_per_token": 2, "expert_capacity": 0.5}},
    "plain": {"moe": {"experts_per_token": 1, "expert_gated": False, "router_normalize": False}, "ffn_bias": False},
    "three": {"moe": {"experts_per_token": 3, "expert_gated": False, "expert_capacity": 1.0}},
}


def mixture(**changes):
    moe = {"num_experts": E, "balance_loss": 0.5, "router_z_loss": 0.25, **changes.pop("moe", {})}
    return make_ffn(tiny("decoder_lm", ffn="moe", moe=moe, activation="silu", **changes))


def outcome(module, params, x, real):
    """Returns the values and both losses."""
    y, collected = module.apply({"params": params}, x, real, train=True, mutable=["losses"])
    return y, jnp.stack([loss[0] for loss in collected["losses"].values()])


def dense(module, params, x, real):
    """Returns `outcome` computed with every expert reading every token."""
    cfg, activation = module.cfg, kinds.load(kinds.ACTIVATIONS, module.cfg.activation)
    logits = x @ params["router"]
    experts, weights = moe.route(logits, real, cfg, limited=cfg.moe.expert_capacity is not None)

    def affine(name, x):
        bias = params[f"{name}_bias"][:, None, None] if cfg.ffn_bias else 0
        return jnp.einsum("ebti,eio->ebto", x, params[f"{name}_kernel"]) + bias

    everywhere = jnp.broadcast_to(x, (E, *x.shape))
    hidden = affine("expand", everywhere)
    hidden = hidden * activation(affine("gate", everywhere)) if cfg.moe.expert_gated else activation(hidden)
    share = jnp.einsum("btke,btk->ebt", jax.nn.one_hot(experts, E), weights)
    losses = [0.5 * moe.balance_loss(logits, experts, real), 0.25 * moe.router_z_loss(logits, real)]
    return (share[..., None] * affine("contract", hidden)).sum(0), jnp.stack(losses)


def differentiated(function, module):
    """Jits the outcome and the gradients of a scalar that depends on all of it."""

    def objective(params, x, real):
        y, losses = function(module, params, x, real)
        return (y * normal(*x.shape, seed=7)).sum() + losses.sum(), (y, losses)

    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))


compiled_dense = functools.cache(functools.partial(differentiated, dense))


def placed(params, mesh, module, x):
    """Shards the parameters by the rules."""
    where = rules.parameter_specs(shapes_of(module, x), mesh.shape)
    return jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), where))


def assert_same_on(mesh, module, params, x, real=REAL, tolerance=1e-5):
    (_, expected), expected_grads = compiled_dense(module)(params, x, real)
    with rules.use_mesh(mesh):
        (_, actual), grads = differentiated(outcome, module)(placed(params, mesh, module, x), x, real)
    formula = oracles.mixture(oracles.f64(params), np.float64(x), module.cfg, real, train=True)
    proves = (f"ffn=moe, 8 devices, {module.cfg.dtype}", "NumPy float64")
    assert_close(actual[0], formula, tolerance, proves=proves)
    for got, wanted in zip(jax.tree.leaves((actual, grads)), jax.tree.leaves((expected, expected_grads)), strict=True):
        assert_close(got, wanted, tolerance)


def mesh_of(name):
    return make_mesh(ParallelConfig(**MESHES[name]))


EACH = {f"{name}-{mesh}": (name, mesh) for name in CHANGES for mesh in MESHES}
OFTEN = ("capacity-expert=2,fsdp=2,tensor=2",)
FAST = {key: EACH[key] for key in OFTEN}


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(FAST | EACH, len(FAST)))
def test_values_losses_and_gradients(case):
    """With a limited capacity, the meshes of three axes suffice."""
    name, mesh = case
    module, x = mixture(**CHANGES[name]), normal(B, T, D)
    assert_same_on(mesh_of(mesh), module, init_module(module, x), x)


@pytest.mark.parametrize(
    "changes", rest_slow([CHANGES["gated"], {"moe": {"experts_per_token": 3, "expert_capacity": 2.0}}], 0)
)
def test_all_tokens_choose_experts_of_one_device(changes):
    module, x = mixture(**changes), normal(B, T, D).at[..., 0].set(3.0)
    params = init_module(module, x)
    params["router"] = params["router"].at[0].set(jnp.array([0, 0, 0, 0, 4, 8, 6, 0]))
    assert_same_on(mesh_of("data=4,expert=2"), module, params, x)


@pytest.mark.parametrize("mesh", rest_slow(["data=2,expert=2,sequence=2", "data=4,expert=2"], 0))
def test_rows_and_positions_that_the_mesh_does_not_divide(mesh):
    module, x = mixture(moe={"experts_per_token": 2}), normal(3, 5, D)
    assert_same_on(mesh_of(mesh), module, init_module(module, x), x, np.arange(5) < np.array([5, 2, 4])[:, None])


@pytest.mark.parametrize("mesh", rest_slow(["expert=8"], 0))
def test_room_for_one_token_per_expert(mesh):
    module, x = mixture(moe={"expert_capacity": 1e-6}), normal(B, T, D)
    assert_same_on(mesh_of(mesh), module, init_module(module, x), x)


@pytest.mark.parametrize("mesh", rest_slow(["expert=2,fsdp=2,tensor=2"], 0))
def test_bfloat16(mesh):
    module, x = mixture(dtype="bfloat16"), normal(B, T, D)
    assert_same_on(mesh_of(mesh), module, init_module(module, x), x, tolerance=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_training_step(mesh):
    presets.assert_as_alone("experts", **MESHES[mesh])


def gathered(text):
    """Returns the shapes that a compiled program gathers from several devices."""
    actual = re.findall(r" = \(?(\w+\[[\d,]*\])\S* all-gather(?:-start)?\(", text)
    return [tuple(map(int, re.findall(r"\d+", shape.split("[")[1]))) for shape in actual]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", rest_slow(["expert=2,fsdp=2,tensor=2", "data=4,expert=2", "expert=8", "data=8"], 1))
@pytest.mark.parametrize("capacity", rest_slow([0.5, None], 1))
def test_tokens_are_sent_and_experts_are_not_gathered(mesh, capacity):
    cfg = plain(presets.config("experts", **MESHES[mesh]))
    cfg = dataclasses.replace(cfg, model=with_settings(cfg.model, moe={"expert_capacity": capacity}))
    text = lowered(cfg).compile().as_text()
    assert (" all-to-all(" in text) == ("expert" in mesh)
    shapes = gathered(text)
    if "fsdp" not in mesh:
        assert not shapes
        return
    experts = {shape for shape in shapes if len(shape) == 3 and shape[1:] == (16, 8)}
    assert experts == {(4, 16, 8)}, shapes  # kernels over fsdp, of this device's experts only
    assert not [shape for shape in shapes if shape[0] == 64 or (len(shape) == 3 and shape[0] == 8)], shapes
