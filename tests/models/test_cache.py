"""Decoding with a cache gives the logits of the full pass."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, build, tiny
from tformer_jax.special_tokens import PAD

TOKENS = np.array([[5, 6, 7, 8, 9, 4], [4, 10, 4, 6, 8, 7]], np.int32)
SOURCE = np.array([[9, 8, 7, 4], [6, 5, PAD, PAD]], np.int32)

VARIANTS = {
    "sinusoidal, pre": {},
    "learned, post": {"position": "learned", "norm_placement": "post", "final_norm": False},
    "none, GQA, RMSNorm": {"position": "none", "num_kv_heads": 2, "norm": "rmsnorm"},
    "MQA, fused": {"num_kv_heads": 1, "attention_projections": "fused_qkv"},
}
CHUNKS = {"one by one": [1] * 6, "prefill and steps": [4, 1, 1], "chunked prefill": [2, 3, 1]}


def read_in_chunks(model, params, cache, tokens, chunks, mask=None):
    logits, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        token_mask = None if mask is None else jnp.asarray(mask[:, part])
        step, cache = model.apply(
            {"params": params}, tokens[:, part], cache, token_mask=token_mask, method="decode_step"
        )
        logits.append(step)
        start += size
    return np.concatenate(logits, axis=1), cache


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_decoder_lm(changes, chunks):
    model, params = build(tiny("decoder_lm", **changes))
    cache = model.apply({"params": params}, 2, 8, method="init_cache")
    logits, cache = read_in_chunks(model, params, cache, TOKENS, chunks)
    assert_close(logits, model.apply({"params": params}, TOKENS))
    assert cache.index == 6
    np.testing.assert_array_equal(cache.lengths, [6, 6])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("chunks", [CHUNKS["one by one"], CHUNKS["chunked prefill"]], ids=["one by one", "chunked"])
def test_seq2seq(changes, chunks):
    model, params = build(tiny("seq2seq", **changes))
    mask = jnp.asarray(SOURCE != PAD)
    memory = model.apply({"params": params}, SOURCE, mask, method="encode")
    cache = model.apply({"params": params}, memory, mask, 6, method="init_cache")
    logits, _ = read_in_chunks(model, params, cache, TOKENS, chunks)
    assert_close(logits, model.apply({"params": params}, SOURCE, TOKENS, source_mask=mask))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_left_padding_changes_nothing(changes):
    model, params = build(tiny("decoder_lm", **changes))
    padded = np.array([[PAD, PAD, 5, 6, 7, 8], [4, 10, 4, 6, 8, 7]], np.int32)
    cache = model.apply({"params": params}, 2, 8, method="init_cache")
    logits, cache = read_in_chunks(model, params, cache, padded, [3, 2, 1], padded != PAD)
    assert_close(logits[:1, 2:], model.apply({"params": params}, padded[:1, 2:]))
    assert_close(logits[1:], model.apply({"params": params}, padded[1:]))
    np.testing.assert_array_equal(cache.lengths, [4, 6])


def test_only_the_last_logits():
    model, params = build(tiny("decoder_lm"))
    cache = model.apply({"params": params}, 2, 8, method="init_cache")
    full, _ = model.apply({"params": params}, TOKENS, cache, method="decode_step")
    last, _ = model.apply({"params": params}, TOKENS, cache, last_only=True, method="decode_step")
    np.testing.assert_array_equal(last, full[:, -1:])
