"""Caches whose rows add and remove tokens independently, compared with Python lists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_jax.base.errors import UserError
from tformer_jax.nn.row_slots import PagedSlots, RowSlots
from tformer_jax.nn.slots import EMPTY, DenseSlots, RingSlots, Tokens

ROWS, S, T = 3, 8, 3
PAGES = np.arange(1, 1 + ROWS * 2).reshape(ROWS, 2)


def read(slots, remaining, tokens: list[list[int | None]], lengths: list[int]):
    """Writes tokens to the rows, None for padding; the key of a token is its name."""
    places = [[EMPTY if name is None else length for name in row] for row, length in zip(tokens, lengths, strict=True)]
    places = [
        [n + sum(p != EMPTY for p in row[:i]) if n != EMPTY else EMPTY for i, n in enumerate(row)] for row in places
    ]
    keys = np.array([[-9 if name is None else name for name in row] for row in tokens], np.float32)
    slots, remaining, positions, attended = call(slots, remaining, np.array(places, np.int32), keys[:, None, :, None])
    attended = np.asarray(attended)[:, 0, :, 0]
    if isinstance(slots, PagedSlots):
        attended = attended[slots.table].reshape(ROWS, S)
    return slots, remaining, np.asarray(positions), attended


@jax.jit
def allocate(slots, places):
    return slots.allocate(Tokens.of_call(places))


@jax.jit
def call(slots, cache, places, keys):
    slots, seen = slots.allocate(Tokens.of_call(places))
    cache, attended = slots.extend(cache, keys)
    return slots.end_call(), cache, seen.positions, attended


@jax.jit
def without_newest(slots, counts):
    return slots.remove_newest(counts)


def held(positions: np.ndarray, keys: np.ndarray) -> list[list[int]]:
    """Returns the names in each row, ordered by their positions 0, 1, ..."""
    rows = []
    for place, key in zip(positions, keys, strict=True):
        order = [slot for slot in np.argsort(place, kind="stable") if place[slot] != EMPTY]
        assert place[order].tolist() == list(range(len(order)))
        rows.append(key[order].tolist())
    return rows


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_rows_remove_different_numbers_of_tokens(kind):
    @settings(max_examples=40)
    @given(data=st.data())
    def check(data):
        if kind == "paged":
            slots, remaining = PagedSlots.without_pages(ROWS, 2, S // 2), jnp.zeros((1 + ROWS * 2, 1, S // 2, 1))
            slots = dataclasses.replace(slots, table=PAGES)
        else:
            slots, remaining = RowSlots.empty(ROWS, S), jnp.zeros((ROWS, 1, S, 1))
        shapes = [leaf.shape for leaf in (slots.index, slots.added, slots.tokens.positions)]
        expected: list[list[int]] = [[] for _ in range(ROWS)]
        name = 0
        for _ in range(data.draw(st.integers(1, 4))):
            tokens: list[list[int | None]] = []
            for row in expected:
                real = data.draw(st.lists(st.booleans(), min_size=T, max_size=T))
                room = S - len(row)
                names = [name + i if there and sum(real[:i]) < room else None for i, there in enumerate(real)]
                tokens.append(names)
                name += T
            lengths = [len(row) for row in expected]
            slots, remaining, positions, keys = read(slots, remaining, tokens, lengths)
            for row, names in zip(expected, tokens, strict=True):
                row += [each for each in names if each is not None]
            assert held(positions, keys) == expected
            counts = [data.draw(st.integers(0, len(row))) for row in expected]
            slots = without_newest(slots, np.array(counts, np.int32))
            expected = [row[: len(row) - count] for row, count in zip(expected, counts, strict=True)]
            assert [leaf.shape for leaf in (slots.index, slots.added, slots.tokens.positions)] == shapes
            np.testing.assert_array_equal(
                (np.asarray(slots.tokens.positions) != EMPTY).sum(1), list(map(len, expected))
            )

    check()


@pytest.mark.parametrize(("T", "width"), [(7, 1), (6, 2)])
def test_tokens_of_one_call_have_distinct_slots_of_a_ring(T, width):
    """A scatter to equal indices keeps any of the values."""
    places = np.repeat(np.arange(T // width, dtype=np.int32), width)[None]
    slots, _ = allocate(RingSlots.empty(1, 2, width), places)
    stored = [slot for slot in slots.added[0].tolist() if slot < 2 * width]
    assert sorted(stored) == list(range(2 * width))


@pytest.mark.parametrize("make", [lambda: DenseSlots.empty(2, 4), lambda: RingSlots.empty(2, 4, 1)])
def test_a_removed_token_is_overwritten(make):
    slots, remaining, *_ = read(make(), jnp.zeros((2, 1, 4, 1)), [[10, 11, 12], [None, 20, 21]], [0, 0])
    slots = without_newest(slots, np.array([1, 1], np.int32))
    slots, remaining, *_ = read(slots, remaining, [[13], [22]], [2, 1])
    _, _, positions, keys = read(slots, remaining, [[14], [23]], [3, 2])
    assert held(positions, keys) == [[10, 11, 13, 14], [20, 22, 23]]


@pytest.mark.parametrize("window", [1, 3, 4])
def test_a_ring_keeps_each_rows_window_for_any_padding(window):
    """A token attends to the last `window` real tokens of its row, itself included."""

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def check(data):
        slots, remaining = RingSlots.empty(ROWS, window, 1), jnp.zeros((ROWS, 1, window, 1))
        read_so_far: list[list[int]] = [[] for _ in range(ROWS)]
        for T in data.draw(st.lists(st.sampled_from([1, 4]), min_size=1, max_size=4)):
            real = np.array(data.draw(st.lists(st.booleans(), min_size=ROWS * T, max_size=ROWS * T))).reshape(ROWS, T)
            start = sum(map(len, read_so_far))
            tokens = [[start + T * b + t if real[b, t] else None for t in range(T)] for b in range(ROWS)]
            slots, remaining, positions, keys = read(slots, remaining, tokens, [len(row) for row in read_so_far])
            for row, names, place, key in zip(read_so_far, tokens, positions, keys, strict=True):
                seen = dict(zip(place.tolist(), key.tolist(), strict=True))
                for name in (name for name in names if name is not None):
                    row.append(name)
                    at = len(row) - 1
                    mine = [seen.get(near) for near in range(max(at - window + 1, 0), at + 1)]
                    assert mine == row[-window:]

    check()


@pytest.mark.parametrize("make", [lambda: DenseSlots.empty(2, 4), lambda: RowSlots.empty(2, 4)])
def test_a_full_cache_refuses_the_next_token(make):
    slots, _ = allocate(make(), np.arange(4, dtype=np.int32)[None].repeat(2, axis=0))
    with pytest.raises(UserError, match="5 tokens do not fit a cache of 4 slots; pass a larger length to `init_cache`"):
        slots.end_call().allocate(Tokens.of_call(jnp.full((2, 1), 4)))
