"""Residual placement, whole layers and stacks against float64."""

import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, assert_close, init_module, normal, tiny
from tformer_jax.nn.layers import LayerContext, TransformerLayer
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.stacks import Decoder, Encoder

B, T, S, N, D = 2, 4, 3, 4, 8
REAL = np.array([[True, True, True], [True, True, False]])


@pytest.mark.parametrize("placement", ["pre", "post", "both", "output"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_layer_with_cross_attention(placement, norm):
    cfg = tiny("seq2seq", norm_placement=placement, norm=norm, num_kv_heads=2)
    module = TransformerLayer(cfg, cross=True)
    x, memory = normal(B, T, D), normal(B, S, D, seed=1)
    around = LayerContext(masks={"full": Mask(causal=True)}, memory=memory, cross_mask=Mask(padding_mask=REAL))
    params = init_module(module, x, around)
    out, cache = apply(module, params, x, around)
    expected = oracles.layer(
        np.float64(x),
        oracles.f64(params),
        cfg,
        oracles.causal_mask(T),
        np.float64(memory),
        oracles.padding_mask(REAL),
    )
    assert cache is None
    assert_close(out, expected, proves=([f"norm_placement={placement}", f"norm={norm}"], "NumPy float64"))


@pytest.mark.long
def test_stacks_have_their_own_depths():
    cfg = tiny("seq2seq", encoder_layers=2, decoder_layers=3)
    encoder, decoder = Encoder(cfg, 2), Decoder(cfg, 3, cross=True)
    x, memory = normal(B, T, D), normal(B, S, D, seed=1)
    params = {"encoder": init_module(encoder, memory, REAL), "decoder": init_module(decoder, x, None, memory, REAL)}
    p = oracles.f64(params)
    seen = oracles.padding_mask(REAL)
    encoded = oracles.stack(np.float64(memory), p["encoder"], cfg, 2, seen)
    decoded = oracles.stack(np.float64(x), p["decoder"], cfg, 3, oracles.causal_mask(T), np.float64(memory), seen)
    assert_close(apply(encoder, params["encoder"], memory, REAL), encoded)
    assert_close(apply(decoder, params["decoder"], x, None, memory, REAL), decoded)


@pytest.mark.parametrize(
    ("placement", "final_norm", "closed"),
    [
        ("pre", None, True),
        ("post", None, False),
        ("both", None, True),
        ("output", None, True),
        ("pre", False, False),
        ("post", True, True),
    ],
)
def test_a_post_norm_stack_has_no_final_norm_by_default(placement, final_norm, closed):
    encoder = Encoder(tiny("classifier", norm_placement=placement, final_norm=final_norm), 1)
    assert ("norm" in init_module(encoder, normal(B, S, D), REAL)) == closed


def test_post_norm_output_is_normalized():
    cfg = tiny("classifier", norm_placement="post")
    encoder = Encoder(cfg, 1)
    x = normal(B, S, D)
    params = init_module(encoder, x, REAL)
    params["layers_0"]["ffn_residual"]["norm"] = {"scale": np.ones(D), "bias": np.zeros(D)}
    out = np.float64(apply(encoder, params, x, REAL))
    np.testing.assert_allclose(out.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(out.std(-1), 1, atol=1e-3)


def test_without_positions_an_encoder_is_permutation_equivariant():
    encoder = Encoder(tiny("classifier"), 2)
    x, order = normal(1, 5, D), [3, 1, 4, 0, 2]
    params = init_module(encoder, x, None)
    assert_close(apply(encoder, params, x[:, order], None), apply(encoder, params, x, None)[:, order])
