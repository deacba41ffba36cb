"""Attention to a paged cache, while rows allocate, release and share pages, against dense float64 attention."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from tests.helpers import assert_close, build, normal, tiny
from tformer_jax.nn.attention_ops import paged
from tformer_jax.nn.decoder_cache import paged_cache
from tformer_jax.nn.kv_cache import KeyValues
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.row_slots import PagedSlots
from tformer_jax.nn.slots import EMPTY, Tokens

SIZE, A_ROW, ROWS = 2, 4, 3


def put(slots: PagedSlots, pool: jax.Array, counts: list[int], first: list[int]):
    """Each row reads `counts` tokens, whose key is 100 * row + position; the longest row has no padding."""
    T = max(counts)
    places = np.full((ROWS, T), EMPTY)
    for row, (count, begin) in enumerate(zip(counts, first, strict=True)):
        places[row, :count] = np.arange(begin, begin + count)
    keys = (100 * np.arange(ROWS)[:, None] + places)[:, None, :, None].astype(np.float32)
    slots, pool, positions = written(slots, pool, places.astype(np.int32), keys)
    return slots, pool, np.asarray(positions), np.asarray(pool)[slots.table, 0, :, 0].reshape(ROWS, -1)


@jax.jit
def written(slots, pool, places, keys):
    slots, seen = slots.allocate(Tokens.of_call(places))
    return slots, slots.extend(pool, keys)[0], seen.positions


@pytest.mark.long
@settings(max_examples=30)
@given(data=st.data())
def test_rows_read_their_own_tokens(data):
    pages = data.draw(st.permutations(range(1, 1 + ROWS * A_ROW)))
    slots = dataclasses.replace(
        PagedSlots.without_pages(ROWS, A_ROW, SIZE), table=jnp.asarray(pages, jnp.int32).reshape(ROWS, A_ROW)
    )
    pool, lengths = jnp.zeros((1 + ROWS * A_ROW, 1, SIZE, 1)), [0] * ROWS
    for _ in range(data.draw(st.integers(1, 4))):
        counts = [data.draw(st.integers(0, min(3, A_ROW * SIZE - length))) for length in lengths]
        if not max(counts):
            continue
        slots, pool, positions, keys = put(slots, pool, counts, lengths)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(positions[row], [*range(length), *[EMPTY] * (A_ROW * SIZE - length)])
            np.testing.assert_array_equal(keys[row, :length], 100 * row + np.arange(length))
    np.testing.assert_array_equal(slots.index, lengths)


def call(lengths: list[int], T: int, reads: list[bool], *, size: int = 2, pages: int = 8) -> PagedSlots:
    """Returns slots of rows with the given lengths after a call of T tokens, for some rows of padding only.

    The rows share their first page.
    """
    table = 1 + np.random.default_rng(0).permutation(len(lengths) * pages).reshape(len(lengths), pages)
    table[:, 0] = table[0, 0]
    S = pages * size
    held = np.where(np.arange(S) < np.array(lengths)[:, None], np.arange(S), EMPTY)
    added = np.array(lengths)[:, None] - T + np.arange(T)
    added = np.where(np.array(reads)[:, None], added, S)
    tokens = Tokens(jnp.asarray(held), jnp.zeros(held.shape, jnp.int32))
    return PagedSlots(tokens, jnp.asarray(lengths), jnp.asarray(added), jnp.asarray(table))


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("explicit", [False, True])
def test_attention_in_place_equals_dense_attention(T, explicit, monkeypatch):
    """For ragged rows that share a page, in groups of four slots; a row without new tokens gets zeros."""
    monkeypatch.setattr(paged, "GROUP", 4)
    lengths, reads, N, K, H = [16, 5, 9, 11], [True, True, False, True], 4, 2, 3
    slots, q = call(lengths, T, reads), 2 * normal(4, T, N, H)
    pool = KeyValues(normal(33, K, 2, H, seed=1), normal(33, K, 2, H, seed=2))
    queries = jnp.asarray(lengths)[:, None] - T + jnp.arange(T)
    some = jax.random.bernoulli(jax.random.key(3), 0.6, (4, 1, T, 16)) if explicit else None
    mask = Mask(explicit=some, positions=(queries, slots.tokens.positions), causal=True, window=10)

    @jax.jit
    def attend(q, slots, mask):
        return paged.attend_pages(q, pool, slots, mask, scale=0.7, softcap=3.0), mask.dense(T, 16)

    actual, dense = attend(q, slots, mask)
    k, v = (np.swapaxes(np.asarray(x)[slots.table], 2, 3).reshape(4, 16, K, H) for x in (pool.k, pool.v))
    expected = oracles.attention_core(*map(oracles.f64, (q, k, v)), np.asarray(dense), scale=0.7, softcap=3.0)
    assert_close(actual, np.where(np.array(reads)[:, None, None, None], expected, 0))
    assert not np.asarray(actual)[2].any()


def test_only_pages_in_use_are_read(monkeypatch):
    """The number of groups follows the tokens of the rows that have queries."""
    monkeypatch.setattr(paged, "GROUP", 4)
    lengths, reads = [16, 5, 9, 9], [True, True, False, True]
    slots = call(lengths, 1, reads)
    mask = Mask(positions=(jnp.zeros((4, 1), jnp.int32), slots.tokens.positions))
    x = paged.PagedOperands(normal(4, 1, 1, 1), None, slots, mask, None, None)
    assert int(jax.jit(lambda x: paged._blocks(x).groups)(x)) == math.ceil((8 + 3 + 5) / 2)


def test_a_step_has_no_array_of_the_size_of_a_dense_cache(monkeypatch):
    monkeypatch.setattr(paged, "GROUP", 64)
    B, pages_per_row, size = 8, 64, 4
    model, params = build(tiny("decoder_lm", max_length=256, position="rotary", head_dim=8))
    cache = jax.eval_shape(lambda: paged_cache(model.cfg, B, pages=65, page_size=size, pages_per_row=pages_per_row))

    def step(params, tokens, cache):
        return model.apply({"params": params}, tokens, cache, method="decode_step")

    compiled = jax.jit(step, donate_argnums=2).lower(params, np.zeros((B, 1), np.int32), cache).compile()
    shapes = re.findall(r"\bf32\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    pool, dense = (slots * model.cfg.kv_heads * model.cfg.head_size for slots in (65 * size, B * pages_per_row * size))
    assert largest == pool < dense / 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * pool
