"""The attention layer against float64, and its projection layouts against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, assert_close, init_module, normal, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds
from tformer_jax.config.layers import FUSED
from tformer_jax.models import conversions
from tformer_jax.nn.attention import Attention, BasicAttention
from tformer_jax.nn.attention_ops import Backend
from tformer_jax.nn.attention_ops.reference import reference
from tformer_jax.nn.masks import Mask

B, T, S, D = 2, 4, 5, 8


def layer(*, cross: bool = False, **changes):
    cfg = tiny("decoder_lm", **changes)
    module = Attention(cfg, cross=cross)
    return module, init_module(module, normal(B, T, D), normal(B, S, D) if cross else None)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_with_a_free_head_size(kv_heads, bias):
    biases = ("query", "key", "value", "output") if bias else ()
    module, params = layer(num_kv_heads=kv_heads, head_dim=3, attention_bias=biases)
    assert ("bias" in params["query"]) == bias
    assert params["output"]["kernel"].shape == (4, 3, D)
    x = normal(B, T, D, seed=7)
    out, _ = apply(module, params, x, mask=Mask(causal=True))
    mask = oracles.causal_mask(T)
    assert_close(out, oracles.attention(oracles.f64(params), *[np.float64(x)] * 3, mask))


def test_query_key_and_value_from_three_inputs():
    module, params = layer(cross=True)
    q, k, v = normal(B, T, D, seed=1), normal(B, S, D, seed=2), normal(B, S, D, seed=3)
    out, _ = apply(module, params, q, k, v)
    assert_close(out, oracles.attention(oracles.f64(params), *map(np.float64, (q, k, v))))


def test_values_come_from_the_key_input_by_default():
    module, params = layer(cross=True)
    q, k = normal(B, T, D, seed=1), normal(B, S, D, seed=2)
    out, _ = apply(module, params, q, k)
    np.testing.assert_array_equal(out, apply(module, params, q, k, k)[0])


def test_as_many_key_heads_as_query_heads_is_mha():
    gqa, params = layer(num_kv_heads=4)
    mha, _ = layer()
    x = normal(B, T, D, seed=5)
    np.testing.assert_array_equal(apply(gqa, params, x)[0], apply(mha, params, x)[0])


def test_gqa_equals_mha_with_repeated_heads():
    gqa, params = layer(num_kv_heads=2)
    mha, _ = layer()
    repeated = dict(params)
    for name in ("key", "value"):
        repeated[name] = {leaf: jnp.repeat(array, 2, axis=-2) for leaf, array in params[name].items()}
    x = normal(B, T, D, seed=5)
    expected, _ = apply(mha, repeated, x)
    assert_close(apply(gqa, params, x)[0], expected, 1e-6, proves=("num_kv_heads=2", "repeated heads"))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", ["fused_qkv", "fused_kv"])
@pytest.mark.parametrize("cross", [False, True])
def test_fused_projections_load_separate_weights_and_back(kv_heads, kind, cross):
    separate, params = layer(cross=cross, num_kv_heads=kv_heads)
    fused, fresh = layer(cross=cross, num_kv_heads=kv_heads, attention_projections=kind)
    whole = kind == "fused_qkv" and not cross
    names, name = (("query", "key", "value"), "qkv") if whole else (("key", "value"), "kv")
    converted = conversions.fuse_projections(params, names, name)
    assert jax.tree.map(jnp.shape, converted) == jax.tree.map(jnp.shape, fresh)
    x, memory = normal(B, T, D, seed=5), normal(B, S, D, seed=6) if cross else None
    expected, _ = apply(separate, params, x, memory)
    proves = (f"attention_projections={kind}", "separate projections")
    assert_close(apply(fused, converted, x, memory)[0], expected, 1e-6, proves=proves)

    heads = {"query": 4, "key": kv_heads, "value": kv_heads}
    back = conversions.split_projection(converted, name, {part: heads[part] for part in names})
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize("settings", [{}, {"initializer": "fan_in", "attention_scale": 1.0}, {"attention_scale": 1.0}])
@pytest.mark.parametrize(("kind", "kv_heads"), [("fused_qkv", 4), ("fused_qkv", 2), ("fused_kv", 2)])
def test_fused_projections_start_as_separate_ones(kind, kv_heads, settings):
    """The standard deviations of the initial kernels, of at least 8,192 elements each."""
    deviations = {}
    for projections in ("separate", kind):
        sizes = {"dim": 128, "num_heads": 4, "num_kv_heads": kv_heads}
        module = Attention(tiny("decoder_lm", **sizes, attention_projections=projections, **settings))
        params = init_module(module, jnp.zeros((1, 1, 128)))
        name = {"fused_qkv": "qkv", "fused_kv": "kv"}.get(projections)
        heads = {"query": 4, "key": kv_heads, "value": kv_heads}
        parts = {part: heads[part] for part in FUSED[projections]}
        separate = params if name is None else conversions.split_projection(params, name, parts)
        deviations[projections] = [float(separate[part]["kernel"].std()) for part in heads]
    np.testing.assert_allclose(deviations[kind], deviations["separate"], rtol=0.03)


@pytest.mark.parametrize(("kind", "cross"), [("fused_qkv", False), ("fused_qkv", True), ("fused_kv", True)])
def test_a_fused_projection_refuses_different_inputs(kind, cross):
    module, params = layer(cross=cross, attention_projections=kind)
    q, k, v = normal(B, T, D), normal(B, S, D, seed=1), normal(B, S, D, seed=2)
    with pytest.raises(UserError, match=f"{kind}' projects one input; write 'separate'"):
        apply(module, params, q, k, v)


def test_attention_dropout_needs_training():
    module, params = layer(attention_dropout=0.5)
    x = normal(B, T, D)
    plain, _ = apply(module, params, x)
    dropped, _ = apply(module, params, x, train=True, rngs={"dropout": jax.random.key(0)})
    assert np.abs(plain - dropped).max() > 1e-3


def test_attention_has_an_output_projection():
    module, params = layer()
    x = normal(B, T, D)
    doubled = params | {"output": jax.tree.map(lambda leaf: 2 * leaf, params["output"])}
    out, twice = (apply(module, p, x)[0] for p in (params, doubled))
    assert_close(twice, 2 * out)


def test_basic_attention_runs_the_configured_backend(monkeypatch):
    shapes = []

    def record(x):
        shapes.append(x.q.shape)
        return reference(x)

    monkeypatch.setitem(kinds.BACKENDS, "recorded", Backend(record))
    cfg = tiny("decoder_lm", attention="basic", num_heads=1, attention_backend="recorded")
    BasicAttention(cfg).apply({}, normal(B, T, D))
    assert shapes == [(B, T, 1, D)]
