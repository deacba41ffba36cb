"""A paged cache equals a dense one while rows are given, return and share pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_jax.nn.slots import EMPTY, PagedSlots, Tokens

SIZE, A_ROW, ROWS = 2, 4, 3


def put(slots: PagedSlots, pool: jax.Array, counts: list[int], first: list[int]):
    """Each row reads `counts` tokens, whose key is 100 * row + position; the longest row has no padding."""
    T = max(counts)
    places = np.full((ROWS, T), EMPTY)
    for row, (count, begin) in enumerate(zip(counts, first, strict=True)):
        places[row, :count] = np.arange(begin, begin + count)
    keys = (100 * np.arange(ROWS)[:, None] + places)[:, None, :, None].astype(np.float32)
    slots, seen = slots.admit(Tokens.of_call(jnp.asarray(places)))
    pool, attended = slots.extend(pool, jnp.asarray(keys))
    return slots, pool, np.asarray(seen.positions), np.asarray(attended[:, 0, :, 0])


@settings(max_examples=30)
@given(data=st.data())
def test_rows_read_their_own_tokens(data):
    pages = data.draw(st.permutations(range(1, 1 + ROWS * A_ROW)))
    slots = dataclasses.replace(
        PagedSlots.unheld(ROWS, A_ROW, SIZE), table=jnp.asarray(pages, jnp.int32).reshape(ROWS, A_ROW)
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
