"""Decoding with a cache gives the logits of the full pass."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import apply, assert_close, build, rest_slow, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.nn.decoder_cache import empty_cache, paged_cache, row_cache
from tformer_jax.special_tokens import PAD

TOKENS = np.array([[5, 6, 7, 8, 9, 4], [4, 10, 4, 6, 8, 7]], np.int32)
SOURCE = np.array([[9, 8, 7, 4], [6, 5, PAD, PAD]], np.int32)

VARIANTS = {
    "sinusoidal, pre": {},
    "learned, post": {"position": "learned", "norm_placement": "post", "final_norm": False},
    "none, GQA, RMSNorm": {"position": "none", "num_kv_heads": 2, "norm": "rmsnorm"},
    "MQA, fused": {"num_kv_heads": 1, "attention_projections": "fused_qkv"},
    "rotary, both": {"position": "rotary", "head_dim": 4, "norm_placement": "both", "qk_norm": True},
    "ALiBi, soft-cap": {"position": "alibi", "attention_softcap": 2.0},
    "relative, gated": {
        "position": "relative",
        "relative": {"buckets": 8, "distance": 9, "by_layer": True},
        "ffn": "gated",
    },
    "basic": {"attention": "basic", "num_heads": 1},
    "experts": {"ffn": "moe", "moe": {"num_experts": 3}, "position": "learned"},
    "latents": {
        "attention": "mla",
        "position": "rotary",
        "mla": {"latent_dim": 6, "rotary_dim": 2, "query_latent_dim": 5, "value_dim": 3},
    },
    "gated delta rule": {"attention": "gated_delta", "gated_delta": {"num_key_heads": 2, "key_head_dim": 3}},
    "gated delta rule, attention": {"layer_pattern": ("gated_delta", "full"), "attention_projections": "fused_qkv"},
    "windows": {"window": 2, "layer_pattern": ("window", "full"), "position": "rotary", "head_dim": 4},
    "sinks, a fraction rotated": {
        "attention_sinks": True,
        "num_kv_heads": 2,
        "position": "rotary",
        "head_dim": 4,
        "rotary": {"fraction": 0.5},
    },
    "layers without positions or experts": {
        "layer_pattern": ("full", "nope"),
        "position": "rotary",
        "head_dim": 4,
        "ffn": "moe",
        "moe": {"num_experts": 3, "every": 2, "shared_dim": 5},
    },
}
FULL = "one pass over the whole row"
CHUNKS = {"one by one": [1] * 6, "pairs": [2, 2, 2], "chunked prefill": [2, 2, 1, 1]}


@functools.cache
def variant(name):
    """Returns a language model, its parameters, and its compiled pass without a cache."""
    model, params = build(tiny("decoder_lm", decoder_layers=2, **VARIANTS[name]))
    return model, params, jax.jit(lambda tokens: model.apply({"params": params}, tokens))


def read_in_chunks(model, params, cache, tokens, chunks, mask=None):
    """Returns the logits of every token, and the final cache; chunks of equal size share a compilation."""

    @jax.jit
    def step(params, cache, tokens, token_mask):
        return model.apply({"params": params}, tokens, cache, padding_mask=token_mask, method="decode_step")

    logits = []
    for end, size in zip(np.cumsum(chunks), chunks, strict=True):
        part = slice(end - size, end)
        chunk, cache = step(params, cache, tokens[:, part], None if mask is None else mask[:, part])
        logits.append(chunk)
    return np.concatenate(logits, axis=1), cache


def paged(cfg, table=((3, 1, 6, 5), (2, 7, 4, 8)), **options):
    """Allocates pages of two tokens in arbitrary order."""
    cache = paged_cache(cfg, 2, pages=9, page_size=2, pages_per_row=4, **options)
    slots = {kind: dataclasses.replace(each, table=jnp.array(table)) for kind, each in cache.slots.items()}
    return dataclasses.replace(cache, slots=slots)


EACH = {
    f"{name}, {kind}, {chunks}": (name, kind, chunks)
    for name, kind, chunks in itertools.product(VARIANTS, ("dense", "paged"), CHUNKS)
    if (kind, chunks) != ("dense", "pairs")
}
SEQ2SEQ = ["windows", *(name for name in VARIANTS if name != "windows" and "delta" not in name)]
PATHS = {
    ("dense", "one by one"): ("windows",),
    ("paged", "pairs"): ("relative, gated", "latents", "gated delta rule"),
}
"""Variants with a code path of their own in each kind of cache; those of padding read one kind with others."""
FAST = {key: case for key, case in EACH.items() if case[0] in PATHS.get(case[1:], ())}


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(FAST | EACH, len(FAST)))
def test_decoder_lm(case):
    name, kind, chunks = case
    model, params, full_pass = variant(name)
    cache = paged(model.cfg) if kind == "paged" else empty_cache(model.cfg, 2, 8)
    logits, cache = read_in_chunks(model, params, cache, TOKENS, CHUNKS[chunks])
    assert_close(logits, full_pass(TOKENS), proves=(f"cache: {kind}", FULL))
    np.testing.assert_array_equal(cache.lengths, [6, 6])


@pytest.mark.long
@pytest.mark.parametrize("name", rest_slow(SEQ2SEQ, 1))
def test_seq2seq(name):
    changes = VARIANTS[name]
    model, params = build(tiny("seq2seq", encoder_layers=2, decoder_layers=2, **changes))
    mask = SOURCE != PAD
    memory = apply(model, params, SOURCE, mask, method="encode")
    cache = apply(model, params, memory, mask, length=6, method="init_cache")
    logits, _ = read_in_chunks(model, params, cache, TOKENS, CHUNKS["pairs"])
    expected = apply(model, params, SOURCE, TOKENS, source_padding_mask=mask)
    assert_close(logits, expected, proves=("cache: dense, seq2seq", FULL))


STORED = {
    "keys, int8": ("windows", "int8"),
    "keys, bfloat16": ("windows", "bfloat16"),
    "latents, int8": ("latents", "int8"),
    "latents, bfloat16": ("latents", "bfloat16"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(STORED, 1))
@pytest.mark.parametrize("make", rest_slow({"paged": paged, "dense": empty_cache}, 1))
def test_low_precision_caches_change_logits_little(make, case):
    name, dtype = case
    model, params, full_pass = variant(name)
    cache = make(model.cfg, **({"batch": 2, "length": 8} if make is empty_cache else {}), dtype=dtype)
    logits, _ = read_in_chunks(model, params, cache, TOKENS, CHUNKS["pairs"])
    exact = full_pass(TOKENS)
    kind = "dense" if make is empty_cache else "paged"
    assert_close(logits, exact, 0.02, proves=(f"cache: {kind}, {dtype}", FULL))
    assert np.abs(logits - exact).max() > 1e-5


PLACED = ("learned, post", "ALiBi, soft-cap", "relative, gated", "experts", "latents", "gated delta rule", "windows")
"""Variants in which padding could shift a position, an expert's share or a state."""


@pytest.mark.long
@pytest.mark.parametrize("name", rest_slow([*PLACED, *(name for name in VARIANTS if name not in PLACED)], len(PLACED)))
@pytest.mark.parametrize("kind", rest_slow(["rows", "paged", "dense"], 1))
def test_left_padding_changes_nothing(name, kind):
    model, params, full_pass = variant(name)
    padded = np.array([[PAD, PAD, 5, 6, 7, 8], [4, 10, 4, 6, 8, 7]], np.int32)
    cache = {"dense": empty_cache, "rows": row_cache}[kind](model.cfg, 2, 8) if kind != "paged" else paged(model.cfg)
    logits, cache = read_in_chunks(model, params, cache, padded, [3, 3], padded != PAD)
    expected = full_pass(np.array([[5, 6, 7, 8, 4, 4], padded[1]], np.int32))  # the last two are not compared
    assert_close(logits[0, 2:], expected[0, :4], proves=(f"cache: {kind}, padding before", FULL))
    assert_close(logits[1], expected[1])
    np.testing.assert_array_equal(cache.lengths, [4, 6])


@pytest.mark.long
def test_prompts_of_a_prefix_lm_are_bidirectional():
    model, params = build(tiny("decoder_lm", decoder_layers=2, prefix_lm=True))
    padded = np.array([[PAD, PAD, 5, 6, 7, 8], [4, 10, 4, 6, 8, 7]], np.int32)
    cache = model.apply({}, 2, 8, np.array([2, 4], np.int32), method="init_cache")
    logits, _ = read_in_chunks(model, params, cache, padded, [4, 1, 1], padded != PAD)
    rows = np.array([[5, 6, 7, 8, 4, 4], padded[1]], np.int32)  # the last two are not compared
    expected = apply(model, params, rows, prefix=np.array([2, 4]))
    assert_close(logits[0, 2:], expected[0, :4])
    assert_close(logits[1], expected[1])
    with pytest.raises(UserError, match="model.prefix_lm=True: needs `prompt_lengths`"):
        model.apply({}, 2, 8, method="init_cache")


def test_a_prompt_longer_than_the_cache_is_refused():
    model, params = build(tiny("decoder_lm"))
    cache = model.apply({}, 2, 5, method="init_cache")
    with pytest.raises(UserError, match="6 tokens do not fit a cache of 5 slots"):
        model.apply({"params": params}, TOKENS, cache, method="decode_step")


def test_only_the_last_logits():
    model, params = build(tiny("decoder_lm"))
    cache = model.apply({}, 2, 8, method="init_cache")
    full, _ = apply(model, params, TOKENS, cache, method="decode_step")
    last, _ = apply(model, params, TOKENS, cache, last_only=True, method="decode_step")
    np.testing.assert_array_equal(last, full[:, -1:])


@pytest.mark.long
@pytest.mark.parametrize("kind", rest_slow(["ring", "rows", "dense"], 1))
def test_right_padding_changes_nothing(kind):
    changes = VARIANTS["windows"] | ({"layer_pattern": ("full",), "window": None} if kind == "dense" else {})
    model, params = build(tiny("decoder_lm", decoder_layers=2, **changes))
    padded = np.array([[5, 6, 7, PAD, PAD, 8, PAD, 9], [4, 10, 4, 6, 8, 7, 5, 6]], np.int32)
    cache = (row_cache if kind == "rows" else empty_cache)(model.cfg, 2, 8)
    logits, _ = read_in_chunks(model, params, cache, padded, [4, 2, 2], padded != PAD)
    expected = apply(model, params, padded[:1, padded[0] != PAD])[0]
    assert_close(logits[0][padded[0] != PAD], expected, proves=(f"cache: {kind}, padding between", FULL))
    assert_close(logits[1:], apply(model, params, padded[1:]))
