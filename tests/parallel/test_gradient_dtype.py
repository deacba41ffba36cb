"""Gradients are summed over tokens and devices in float32, whatever the dtypes of computation and parameters."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import rest_slow
from tests.parallel.test_collectives import lowered, plain
from tests.parallel.test_presets import MODELS, config
from tformer_jax import axes
from tformer_jax.nn import gathered, grouped
from tformer_jax.nn.grouped import grouped_product
from tformer_jax.nn.linear import product

SUM = re.compile(r"= \(?(bf16|f32)\[[^=]* (all-reduce|reduce-scatter)\(")
CASES = [
    ("decoder_lm", "fsdp", "float32", False),
    ("decoder_lm", "dp", "float32", False),
    ("decoder_lm", "zero1", "float32", False),
    ("decoder_lm", "fsdp", "bfloat16", False),
    ("decoder_lm", "fsdp", "float32", True),
    ("decoder_lm", "fsdp", "bfloat16", True),
    ("experts", "fsdp", "float32", False),
    ("experts", "fsdp", "bfloat16", True),
    ("seq2seq", "fsdp", "float32", False),
    ("classifier", "dp", "bfloat16", False),
    ("latents and states", "dp", "float32", False),
    ("widths that no mesh divides", "fsdp", "bfloat16", False),
]


def summed(kind: str, preset: str, folder, **settings) -> list[str]:
    """Returns the dtypes of floating-point sums over devices in the partitioned program of a train step.

    It is read before XLA for CPUs computes all bfloat16 in float32. No mesh here sums activations.
    """
    cfg = plain(config(kind, preset=preset))
    model = dataclasses.replace(cfg.model, dtype="bfloat16", **settings)
    cfg = dataclasses.replace(cfg, model=model, seed=time.time_ns() % 2**31)  # no cached program, which dumps nothing
    lowered(cfg).compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning"})
    (text,) = (path.read_text() for path in folder.glob("*after_spmd-partitioning*"))
    return [match[1] for match in SUM.finditer(text)]


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(CASES, 1))
def test_gradients_are_summed_over_devices_in_float32(case, tmp_path, monkeypatch):
    kind, preset, param_dtype, explicit = case
    if explicit:  # the gathers and scatters that are written for TPUs
        monkeypatch.setattr(gathered, "PLATFORMS", ("cpu",))
    actual = summed(kind, preset, tmp_path, param_dtype=param_dtype)
    assert len(actual) > 8
    assert set(actual) == {"f32"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder_lm", "experts"])
def test_the_setting_chooses_bfloat16(kind, tmp_path):
    actual = summed(kind, "fsdp", tmp_path, gradient_dtype="bfloat16")
    assert actual.count("bf16") >= 4


@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_the_gradient_of_a_kernel_is_a_sum_in_float32(contracted, dtype):
    """A sum of 1,001 ones; bfloat16 has 1,000 and 1,004."""
    x, kernel = jnp.ones((1001, 1), jnp.bfloat16), jnp.full((1, 1), 1 / 3)
    names = (axes.EMBED, axes.MLP)

    def total(x, kernel):
        out = product(x, kernel, names, contracted=contracted, dtype=dtype)
        assert out.dtype == (dtype or jnp.bfloat16)
        return out.astype(jnp.float32).sum()

    d_x, d_kernel = jax.jit(jax.grad(total, (0, 1)))(x, kernel)
    assert d_kernel == 1001
    assert d_x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_x.astype(jnp.float32), jnp.bfloat16(1 / 3).astype(jnp.float32))


@pytest.mark.parametrize("rows", [{"cpu": 64}, {}], ids=["blocks", "ragged"])
def test_the_gradient_of_an_experts_kernel_is_a_sum_in_float32(rows, monkeypatch):
    monkeypatch.setattr(grouped, "ROWS", rows)
    x, kernels, counts = jnp.ones((1008, 1), jnp.bfloat16), jnp.ones((2, 1, 1)), jnp.array([1001, 7])
    grouped_product.clear_cache()

    def total(kernels):
        return grouped_product(x, kernels, counts).astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(kernels)[:, 0, 0], [1001, 7])


def test_all_kinds_of_models_are_covered():
    assert {kind for kind, *_ in CASES} == set(MODELS)
