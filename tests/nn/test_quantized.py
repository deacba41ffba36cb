"""Products with int8 kernels against NumPy, models that are trained with them, and decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from tests.helpers import assert_close, build, rest_slow, tiny
from tests.train.test_step import batch, settings
from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ModelConfig
from tformer_jax.inference.layout import decoding_layout, quantized_layout
from tformer_jax.models import registry
from tformer_jax.nn.linear import Linear
from tformer_jax.nn.quantized import integer_product, is_quantized, quantize
from tformer_jax.train.step import accumulated_gradients

PROVES = "model.quantization", "NumPy float64"


def to_grid(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Rounds x to multiples of its largest absolute value along axes / 127."""
    scale = np.abs(np.float64(x)).max(axis=axis, keepdims=True) / 127
    return np.round(x / scale) * scale


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8_weights", "int8"])
def test_products_and_gradients_are_those_of_rounded_arrays(kind):
    """In training and with stored int8; gradients are those of a product with the rounded arrays."""
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(5, 6)), draw.normal(size=(6, 2, 4)) * [[[1], [10]]]
    layer = Linear(
        tiny("decoder_lm", quantization=kind), ((axes.EMBED, 6),), ((axes.HEADS, 2), (axes.HEAD_DIM, 4)), False
    )
    apply = lambda w, x: layer.apply({"params": {"kernel": w}}, x)  # noqa: E731
    w32, x32 = jnp.float32(w), jnp.float32(x)
    grid, rows = to_grid(w, 0), to_grid(x, 1) if kind == "int8" else x
    assert_close(apply(w32, x32), np.einsum("RI,INH->RNH", rows, grid), 1e-5, proves=PROVES)
    assert_close(apply(quantize(w32, range(1, 3)), x32), np.einsum("RI,INH->RNH", rows, grid), 1e-5, proves=PROVES)
    up = draw.normal(size=(5, 2, 4))
    for_w, for_x = jax.grad(lambda w, x: (apply(w, x) * up).sum(), argnums=(0, 1))(w32, x32)
    assert_close(for_w, np.einsum("RI,RNH->INH", rows, up), 1e-5, proves=PROVES)
    assert_close(for_x, np.einsum("RNH,INH->RI", up, grid), 1e-5, proves=PROVES)


def test_rows_of_zeros_have_products_of_zeros():
    x = jnp.zeros((3, 4)).at[1].set(1)
    actual = integer_product(x, quantize(jnp.ones((4, 2)), range(1, 2)))
    assert_close(actual, [[0, 0], [4, 4], [0, 0]], 1e-2)


MODELS = {
    "seq2seq": tiny("seq2seq"),
    "scanned": tiny("decoder_lm", decoder_layers=2, scan_layers=True, ffn="gated"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_slow([*MODELS], 1))
def test_stored_kernels_compute_what_training_does(name):
    """Those of `--quantize`, and of the layout in which a model that was trained with int8 decodes."""
    cfg = dataclasses.replace(MODELS[name], quantization="int8")
    model, params = build(cfg, scale=0.3)
    data = {key: jnp.asarray(np.random.default_rng(1).integers(4, 11, (2, 6))) for key in (*model.inputs, model.labels)}
    exact = dataclasses.replace(cfg, quantization=None)
    forward = jax.jit(lambda model, params: registry.forward(model, params, data).values, static_argnums=0)
    expected = forward(model, params)
    assert np.abs(forward(registry.build(exact), params) - expected).max() > 1e-3
    plain = registry.build(exact)
    for other, stored in (quantized_layout(plain, params, "int8"), decoding_layout(model, params)):
        leaves = flatten_dict(stored)
        kernels = {path for path, leaf in leaves.items() if is_quantized(leaf)}
        assert kernels == set(registry.linear_kernels(other))
        assert {leaves[path].qvalue.dtype for path in kernels} == {jnp.dtype("int8")}
        assert_close(forward(other, stored), expected, 1e-4)
        again, same = decoding_layout(other, stored)
        assert_close(forward(again, same), expected, 1e-4)


@pytest.mark.long
def test_a_step_is_that_of_rounded_kernels():
    """The loss and the gradients, which pass the rounding, are those of kernels that are rounded in NumPy."""
    actual = []
    for quantization in ("int8_weights", None):
        cfg = settings(quantization=quantization)
        model, params = build(cfg.model)
        leaves, kernels = flatten_dict(params), registry.linear_kernels(model) if quantization is None else {}
        for path, (inputs, _) in kernels.items():
            leaves[path] = jnp.float32(to_grid(leaves[path], tuple(range(inputs))))
        step = jax.jit(functools.partial(accumulated_gradients, model, batch=batch(), key=jax.random.key(0), cfg=cfg))
        actual.append(step(unflatten_dict(leaves))[:3])
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-4), *actual)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": {"attention": "mla"}}, "model.quantization='int8': .*mla"),
        ({"model": {"ffn": "moe"}}, "model.quantization='int8': .*moe"),
        ({"train": {"lora_rank": 2, "start_from": "x"}}, "train.lora_rank=2: must be 0 with model.quantization"),
    ],
)
def test_settings_that_do_not_fit(settings, sentence):
    model = {"family": "decoder_lm", "quantization": "int8", **settings.get("model", {})}
    data = {"source": "stdlib_text", "batching": "windows"}
    with pytest.raises(UserError, match=sentence):
        Config.from_dict({**settings, "model": model, "data": data})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("tformer_jax.base.checks.not_installed", lambda names: list(names))
    with pytest.raises(UserError, match=r"model.quantization='int8' needs qwix: pip install -e \"\.\[quantize\]\""):
        registry.build(ModelConfig(quantization="int8", vocab_size=8, source_vocab_size=8))
