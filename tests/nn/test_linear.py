"""Affine maps over several axes, and the initialization of their kernels."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, build, equations, init_module, normal, shapes_of, tiny
from tformer_jax import axes
from tformer_jax.models import registry
from tformer_jax.nn import linear
from tformer_jax.nn.embeddings import TokenEmbedding
from tformer_jax.nn.linear import Linear, aligned_product, kernel_initializer, product
from tformer_jax.nn.xla import product_over_rows

D, N, H = 8, 4, 3
HEADS = ((axes.HEADS, N), (axes.HEAD_DIM, H))
WIDTH = ((axes.EMBED, D),)


def test_splits_the_width_into_heads_and_joins_them_again():
    x = normal(2, 5, D)
    split = Linear(tiny("decoder_lm"), WIDTH, HEADS, use_bias=True)
    params = init_module(split, x)
    heads = split.apply({"params": params}, x)
    assert_close(heads, np.einsum("BTD,DNH->BTNH", np.float64(x), params["kernel"]) + params["bias"], 1e-6)

    join = Linear(tiny("decoder_lm"), HEADS, WIDTH, use_bias=False)
    params = init_module(join, heads)
    assert set(params) == {"kernel"}
    expected = np.einsum("BTNH,NHD->BTD", np.float64(heads), params["kernel"])
    assert_close(join.apply({"params": params}, heads), expected, 1e-6)


def test_parameters_name_their_axes():
    boxed = shapes_of(Linear(tiny("decoder_lm"), WIDTH, HEADS, use_bias=True), normal(1, D))
    assert boxed["kernel"].names == (axes.EMBED, axes.HEADS, axes.HEAD_DIM)
    assert boxed["bias"].names == (axes.HEADS, axes.HEAD_DIM)


@pytest.mark.parametrize(("fan_in", "fan_out", "shape"), [(64, 4 * 16, (64, 4, 16)), (4 * 16, 256, (4, 16, 256))])
def test_xavier_counts_all_axes_of_a_side(fan_in, fan_out, shape):
    kernel = kernel_initializer(tiny("decoder_lm"), fan_in, fan_out)(jax.random.key(0), shape, jnp.float32)
    bound = np.sqrt(6 / (fan_in + fan_out))
    assert 0.99 * bound < np.abs(kernel).max() <= bound
    assert abs(np.std(kernel) / (bound / np.sqrt(3)) - 1) < 0.03


def test_normal_has_the_given_standard_deviation_and_biases_are_zero():
    cfg = tiny("decoder_lm", initializer="normal", init_std=0.05)
    module = Linear(cfg, ((axes.EMBED, 64),), ((axes.MLP, 128),), use_bias=True)
    params = jax.jit(module.init)(jax.random.key(0), normal(1, 64))["params"]
    assert abs(np.std(params["kernel"].value) / 0.05 - 1) < 0.03
    np.testing.assert_array_equal(params["bias"].value, 0)


def test_computes_in_the_computation_dtype():
    module = Linear(tiny("decoder_lm", dtype="bfloat16"), WIDTH, HEADS, use_bias=True)
    params = init_module(module, normal(1, D))
    assert params["kernel"].dtype == jnp.float32
    assert module.apply({"params": params}, normal(1, D)).dtype == jnp.bfloat16


def test_fan_in_keeps_the_variance_of_the_input():
    kernel = kernel_initializer(tiny("decoder_lm", initializer="fan_in"), 64, 9)(jax.random.key(0), (64, 99), "float32")
    assert abs(np.std(kernel) * 8 - 1) < 0.03


def test_only_output_kernels_of_sublayers_are_scaled_down():
    cfg = tiny("decoder_lm", initializer="normal", init_std=0.05, scale_residual_init=True, decoder_layers=8)
    sides = ((axes.EMBED, 64),), ((axes.MLP, 64),)
    plain, ending = (
        jax.jit(Linear(cfg, *sides, use_bias=False, ends_sublayer=ends).init)(jax.random.key(0), normal(1, 64))
        for ends in (False, True)
    )
    assert abs(np.std(plain["params"]["kernel"].value) / 0.05 - 1) < 0.03
    assert_close(ending["params"]["kernel"].value, plain["params"]["kernel"].value / 4)


NAMES = ("embed", "mlp")


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 4), (4, 3)])
def test_a_product_and_its_gradients(inputs, outputs):
    x, kernel, weights = normal(2, 5, inputs), normal(inputs, outputs, seed=1), normal(2, 5, outputs, seed=2)
    dx, d_kernel = jax.grad(lambda x, w: (product(x, w, NAMES) * weights).sum(), argnums=(0, 1))(x, kernel)
    assert_close(product(x, kernel, NAMES), np.einsum("BTD,DF->BTF", np.float64(x), kernel), 1e-6)
    assert_close(dx, np.einsum("BTF,DF->BTD", np.float64(weights), kernel), 1e-6)
    assert_close(d_kernel, np.einsum("BTD,BTF->DF", np.float64(x), weights), 1e-6)
    assert product(normal(2, 0, inputs), kernel, NAMES).shape == (2, 0, outputs)


def test_gpus_multiply_by_a_multiple_of_64_columns(monkeypatch):
    """Columns of zeros are added for many rows only; their results are dropped and the values equal the product's."""
    x, kernel, weights = normal(512, 3), normal(3, 65, seed=1), normal(512, 65, seed=2)

    def gradients(multiply):
        return jax.grad(lambda x, w: (multiply(x, w, NAMES) * weights).sum(), argnums=(0, 1))(x, kernel)

    monkeypatch.setattr(linear, "platform", lambda: "gpu")
    columns = {}
    for rows in (511, 512):
        jaxpr = jax.make_jaxpr(lambda x, w: aligned_product(x, w, NAMES))(x[:rows], kernel)
        columns[rows] = [dot.outvars[0].aval.shape[-1] for dot in equations(jaxpr.jaxpr, "dot_general")]
    assert columns == {511: [65], 512: [128]}
    assert_close(aligned_product(x, kernel, NAMES), np.float64(x) @ np.float64(kernel), 1e-6)
    for aligned, plain in zip(gradients(aligned_product), gradients(product), strict=True):
        assert_close(aligned, plain, 1e-6)


def test_bfloat16_heads_have_no_product_with_a_float32_factor():
    """Their gradients are sums in float32 of factors in bfloat16, as NumPy computes them in float64."""
    x, kernel = normal(2, 5, 3).astype("bfloat16"), normal(3, 4, seed=1)
    weights = normal(2, 5, 4, seed=2)

    def gradients(x, kernel):
        return jax.grad(lambda x, w: (product(x, w, NAMES, dtype=jnp.float32) * weights).sum(), argnums=(0, 1))(
            x, kernel
        )

    dots = list(equations(jax.make_jaxpr(gradients)(x, kernel).jaxpr, "dot_general"))
    assert {factor.aval.dtype.name for dot in dots for factor in dot.invars} == {"bfloat16"}
    rounded = np.float64(jnp.asarray(weights).astype("bfloat16"))
    dx, d_kernel = gradients(x, kernel)
    assert d_kernel.dtype == jnp.float32
    assert_close(d_kernel, np.einsum("BTD,BTF->DF", np.float64(x), rounded), 1e-6)
    assert_close(np.float32(dx), np.einsum("BTF,DF->BTD", rounded, np.float64(kernel.astype("bfloat16"))), 1e-2)


def gradient_shapes(multiply, matrix):
    """Returns the shapes of the optimized products in the gradient of `multiply(x, matrix)` for the matrix."""
    x = normal(2, 3, 4)
    gradient = jax.jit(jax.grad(lambda matrix: (multiply(x, matrix) ** 2).sum()))
    return re.findall(r"f32\[([\d,]+)\]\S* dot\(", gradient.lower(matrix).compile().as_text())


def test_cpus_compute_the_gradients_of_tall_matrices_transposed():
    def head(x, table):
        embedding = TokenEmbedding(tiny("decoder_lm", dim=4), 9)
        return embedding.apply({"params": {"embedding": table}}, x, method="attend")

    multiply = functools.partial(product, names=NAMES)
    assert gradient_shapes(multiply, normal(4, 3)) == ["6,3", "3,4"]
    assert gradient_shapes(multiply, normal(4, 9)) == ["6,9", "4,9"]
    assert gradient_shapes(head, normal(9, 4)) == ["6,9", "4,9"]


@pytest.mark.parametrize("family", ["seq2seq", "decoder_lm", "classifier"])
def test_no_gradient_sums_over_several_axes(family):
    """XLA's CPU backend would copy both operands of such a product."""
    model, params = build(tiny(family, norm_placement="pre", tie_embeddings="output"))
    batch = registry.example_batch(model.cfg, 2, 4)
    jaxpr = jax.make_jaxpr(jax.grad(lambda params: registry.forward(model, params, batch).values.sum()))(params)
    summed = [
        [size for axis in dot.params["dimension_numbers"][0][0] if (size := dot.invars[0].aval.shape[axis]) > 1]
        for dot in equations(jaxpr.jaxpr, "dot_general")
    ]
    assert len(summed) > 20
    assert all(len(sizes) <= 1 for sizes in summed)


def test_gradients_of_biases_are_summed_in_float32():
    """Regression test: the sum of 4,096 ones in bfloat16 ended at 1,024."""
    module = Linear(tiny("decoder_lm", dtype="bfloat16"), WIDTH, HEADS, use_bias=True)
    x = jnp.zeros((64, 64, D))
    params = init_module(module, x)
    gradient = jax.jit(jax.grad(lambda params: module.apply({"params": params}, x).astype(jnp.float32).sum()))(params)
    np.testing.assert_array_equal(gradient["bias"], np.full((N, H), 4096))


@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("precision", ["bfloat16", "BF16_BF16_F32"])
def test_a_precision_of_bfloat16_rounds_the_operands_on_a_cpu(precision, contracted):
    """Their sums, and the gradients, are float32; XLA for CPUs ignores the precision of products."""
    x, matrix, weights = normal(2, 5, 6), normal(6, 4, seed=1), normal(2, 5, 4, seed=2)
    stored = matrix if contracted == 0 else matrix.T
    names = NAMES if contracted == 0 else NAMES[::-1]

    def loss(x, matrix):
        return (product(x, matrix, names, contracted=contracted) * weights).sum()

    with jax.default_matmul_precision(precision):
        actual = product(x, stored, names, contracted=contracted)
        dx, d_matrix = jax.grad(loss, argnums=(0, 1))(x, stored)
    rounded = [np.float64(np.asarray(each).astype(jnp.bfloat16)) for each in (x, matrix, weights)]
    assert actual.dtype == dx.dtype == d_matrix.dtype == jnp.float32
    assert_close(actual, rounded[0] @ rounded[1], 1e-6)
    assert_close(dx, rounded[2] @ rounded[1].T, 1e-6)
    expected = np.einsum("BTD,BTF->DF", rounded[0], rounded[2])
    assert_close(d_matrix, expected if contracted == 0 else expected.T, 1e-6)
    with jax.default_matmul_precision("highest"):
        assert_close(product(x, stored, names, contracted=contracted), np.float64(x) @ np.float64(matrix), 1e-6)


@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_bfloat16_stay_in_bfloat16_on_a_cpu(dtype, contracted):
    """XLA for CPUs converts the operands to float32 if the result is bfloat16, or the first operand strided."""
    x, matrix = normal(32, 16).astype(dtype), normal(16, 24, seed=1)
    matrix, names = (matrix, NAMES) if contracted == 0 else (matrix.T, NAMES[::-1])

    def train(x, matrix):
        out, pull = jax.vjp(lambda x, matrix: product(x, matrix, names, contracted=contracted), x, matrix)
        return out, *pull(out)

    with jax.default_matmul_precision("bfloat16"):
        program = jax.jit(train).lower(x, matrix).compile().as_text()
    operands = re.findall(
        r"^%\S+ \(param_0\S*: (\w+)\S*, param_1\S*: (\w+)\S*\) -> f32\S+ \{\n(?:.*\n)*?.* dot\(", program, re.M
    )
    assert operands == [("bf16", "bf16")] * 3, program


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 24), (24, 8)])
def test_a_gradient_of_bfloat16_operands_may_be_transposed(inputs, outputs):
    """Regression test: XLA transposed the product, which it then did not support."""
    x, g = (normal(32, size, seed=size).astype(jnp.bfloat16) for size in (inputs, outputs))
    actual = jax.jit(lambda x, g: jnp.exp(product_over_rows(x, g, jnp.float32).T))(x, g)
    assert_close(actual, np.exp(np.float64(g).T @ np.float64(x)), 1e-4)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 24), (24, 8)])
def test_forward_mode_differentiation(inputs, outputs):
    """Regression test: kernels with more rows than columns had no tangents on CPUs."""
    x, dx = normal(5, inputs), normal(5, inputs, seed=1)
    kernel, d_kernel = normal(inputs, outputs, seed=2), normal(inputs, outputs, seed=3)
    _, tangent = jax.jvp(lambda x, kernel: product(x, kernel, NAMES), (x, kernel), (dx, d_kernel))
    assert_close(tangent, np.float64(dx) @ np.float64(kernel) + np.float64(x) @ np.float64(d_kernel), 1e-5)
