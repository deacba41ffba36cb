"""Multi-head latent attention against float64; `models/test_cache.py` compares its cache with a full pass."""

import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, assert_close, init_module, normal, rest_slow, tiny
from tformer_jax.nn import attention_positions
from tformer_jax.nn.attention_ops import attention_weights
from tformer_jax.nn.decoder_cache import empty_cache
from tformer_jax.nn.latent_attention import LatentAttention
from tformer_jax.nn.masks import Mask

B, T, S, D = 2, 5, 7, 8
SETTINGS = {
    "rotary, small values": {"position": "rotary", "mla": {"latent_dim": 6, "rotary_dim": 4, "value_dim": 3}},
    "latent queries, interleaved": {
        "position": "rotary",
        "rotary": {"pairing": "interleaved"},
        "head_dim": 3,
        "mla": {"latent_dim": 6, "rotary_dim": 2, "query_latent_dim": 9, "value_dim": 7},
    },
    "other scores": {
        "attention_scale": 0.3,
        "attention_softcap": 2.0,
        "norm": "rmsnorm",
        "mla": {"latent_dim": 9, "rotary_dim": 2},
    },
}


@pytest.mark.parametrize("backend", rest_slow(["reference", "blockwise"], 1))
@pytest.mark.parametrize("name", SETTINGS)
def test_the_layer_equals_the_formula(name, backend):
    cfg = tiny("decoder_lm", attention="mla", attention_backend=backend, **SETTINGS[name])
    module, x = LatentAttention(cfg), normal(B, T, D, seed=3)
    params, position = init_module(module, x), None
    if positions := attention_positions.make_attention_positions(cfg, bidirectional=False):
        position = positions.apply({}, np.arange(T)[None], window=False)
    out, _ = apply(module, params, x, mask=Mask(causal=True), position=position)
    p, x = oracles.f64(params), np.float64(x)
    expected = oracles.latent_attention(p, x, x, oracles.causal_mask(T), cfg, position=cfg.position)
    assert_close(out, expected, proves=(f"attention=mla ({name})", "NumPy float64"))


def test_cross_attention_reads_the_latents_of_the_memory():
    cfg = tiny("seq2seq", attention="mla", mla={"latent_dim": 6, "rotary_dim": 2, "value_dim": 3})
    module, x, memory = LatentAttention(cfg, cross=True), normal(B, T, D, seed=3), normal(B, S, D, seed=4)
    params = init_module(module, x, memory)
    real = np.arange(S) < np.array([[S], [2]])
    expected = oracles.latent_attention(
        oracles.f64(params), np.float64(x), np.float64(memory), real[:, None, None], cfg
    )
    full, latents = apply(module, params, x, memory, mask=Mask(padding_mask=real))
    assert_close(full, expected)
    cached, _ = apply(module, params, x, cache=latents, mask=Mask(padding_mask=real))
    assert_close(cached, expected, proves=("attention=mla, weights absorbed into queries", "NumPy float64"))


def test_one_entry_per_token_for_all_heads():
    cfg = tiny("decoder_lm", attention="mla", mla={"latent_dim": 6, "rotary_dim": 2}, num_heads=2)
    entries = empty_cache(cfg, B, 9).layers[0].self_attention
    assert (entries.latent.shape, entries.rotated.shape) == ((B, 1, 9, 6), (B, 1, 9, 2))


def test_weights_can_be_watched():
    cfg = tiny("decoder_lm", attention="mla", mla={"latent_dim": 6, "rotary_dim": 2})
    module, x = LatentAttention(cfg), normal(B, T, D)
    params = init_module(module, x)
    _, actual = apply(module, params, x, mask=Mask(causal=True), mutable=["watch"])
    weights = attention_weights(actual["watch"]["operands"][0])
    assert weights.shape == (B, 4, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
