"""Masks against matrices written by hand."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import rest_slow
from tformer_jax import nn
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.nn.attention_ops import attend
from tformer_jax.nn.masks import Mask, as_mask, lookahead_mask


def rows(*lines: str) -> np.ndarray:
    """Parses a mask: `x` may attend, `.` may not."""
    return np.array([[character == "x" for character in line] for line in lines])


def dense(mask: Mask, T: int, S: int, row: int = 0) -> jax.Array:
    """Returns the mask matrix of one row of the batch."""
    array = mask.dense(T, S)
    assert array is not None
    return jnp.broadcast_to(array, (*array.shape[:2], T, S))[row, 0]


def test_causal_keeps_the_lower_triangle_with_its_diagonal():
    np.testing.assert_array_equal(dense(Mask(causal=True), 4, 4), rows("x...", "xx..", "xxx.", "xxxx"))


def test_padding_hides_keys_in_every_row():
    mask = Mask(padding_mask=jnp.array([[True, True, False], [True, False, False]]))
    np.testing.assert_array_equal(dense(mask, 2, 3), rows("xx.", "xx."))
    np.testing.assert_array_equal(dense(mask, 2, 3, row=1), rows("x..", "x.."))


def test_rules_are_combined():
    mask = Mask(causal=True, padding_mask=jnp.array([[True, False, True]]))
    np.testing.assert_array_equal(dense(mask, 3, 3), rows("x..", "x..", "x.x"))
    explicit = Mask(causal=True, explicit=jnp.array([[[[False, True, True]]]]))
    np.testing.assert_array_equal(dense(explicit, 3, 3), rows("...", ".x.", ".xx"))


def test_no_rule_hides_nothing():
    assert Mask().dense(3, 4) is None
    assert as_mask(None).dense(3, 4) is None


def test_window_counts_the_token_itself():
    np.testing.assert_array_equal(dense(Mask(causal=True, window=2), 4, 4), rows("x...", "xx..", ".xx.", "..xx"))
    np.testing.assert_array_equal(dense(Mask(window=2), 4, 4), rows("xx..", "xxx.", ".xxx", "..xx"))


def test_all_queries_attend_to_the_prefix():
    mask = Mask(causal=True, prefix=jnp.array([2, 0]))
    np.testing.assert_array_equal(dense(mask, 4, 4), rows("xx..", "xx..", "xxx.", "xxxx"))
    np.testing.assert_array_equal(dense(mask, 4, 4, row=1), rows("x...", "xx..", "xxx.", "xxxx"))


def test_tokens_attend_to_their_own_segment():
    segments = jnp.array([[0, 0, 1, 1]])
    np.testing.assert_array_equal(
        dense(Mask(causal=True, segments=(segments, segments)), 4, 4), rows("x...", "xx..", "..x.", "..xx")
    )


def test_positions_set_those_of_queries_and_keys():
    keys = jnp.array([[-1, 0, 1, 2, -1], [3, 4, 0, 1, 2]])
    mask = Mask(causal=True, positions=(jnp.array([[1, 2], [2, 3]]), keys))
    np.testing.assert_array_equal(dense(mask, 2, 5), rows(".xx..", ".xxx."))
    np.testing.assert_array_equal(dense(mask, 2, 5, row=1), rows("..xxx", "x.xxx"))
    near = dataclasses.replace(mask, window=2, prefix=jnp.array([0, 5]))
    np.testing.assert_array_equal(dense(near, 2, 5), rows(".xx..", "..xx."))
    np.testing.assert_array_equal(dense(near, 2, 5, row=1), rows("x..xx", "xx..x"))
    np.testing.assert_array_equal(dense(dataclasses.replace(mask, causal=False), 2, 5), rows(".xxx.", ".xxx."))


@pytest.mark.parametrize(
    ("lookahead", "expected"),
    [
        (3, ("xxxx", "xxxx", "xxxx", "xxxx")),
        (2, ("xxx.", "xxxx", "xxxx", "xxxx")),
        (1, ("xx..", "xxx.", "xxxx", "xxxx")),
        (0, ("x...", "xx..", "xxx.", "xxxx")),
        (-1, ("....", "x...", "xx..", "xxx.")),
    ],
)
def test_lookahead(lookahead, expected):
    np.testing.assert_array_equal(lookahead_mask(4, lookahead)[0, 0], rows(*expected))


def test_no_lookahead_is_causal():
    np.testing.assert_array_equal(lookahead_mask(7, 0)[0, 0], dense(Mask(causal=True), 7, 7))


@pytest.mark.long
@pytest.mark.parametrize("examples", rest_slow([8, 200], 1))
def test_blocks_equal_parts_of_the_dense_mask_and_skipped_ones_are_masked(examples):
    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data):
        mask = data.draw(any_mask(8, 12))
        whole = np.broadcast_to(True if mask.dense(8, 12) is None else mask.dense(8, 12), (2, 1, 8, 12))
        visible = mask.visible_blocks(8, 12, 4, 4)
        for i, j in np.ndindex(2, 3):
            part = whole[..., 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            block = mask.block(jnp.int32(4 * i), 4, jnp.int32(4 * j), 4)
            np.testing.assert_array_equal(np.broadcast_to(True if block is None else block, part.shape), part)
            assert visible[i, j] or not part.any()

    check()


SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3], [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3]])
PLACES = np.array([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
SINGLE_RULES = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "prefix": Mask(causal=True, prefix=np.array([7, 2])),
    "window": Mask(window=2),
    "causal window": Mask(causal=True, window=3),
    "padding before": Mask(padding_mask=np.arange(12) >= np.array([[9], [6]])),
    "padding after": Mask(padding_mask=np.arange(12) < np.array([[3], [5]])),
    "segments": Mask(segments=(SEGMENTS[:, :8], SEGMENTS)),
    "segments of other keys": Mask(segments=(SEGMENTS[:, 4:], SEGMENTS[:, ::-1])),
    "positions": Mask(positions=(PLACES[:, :8], PLACES[:, ::-1]), causal=True, window=4),
    "empty slots": Mask(positions=(PLACES[:, :8], np.where(np.arange(12) < 5, PLACES, -1))),
    "the first slot only": Mask(positions=(PLACES[:, :8], np.where(np.arange(12) < 1, 0, -1)[None])),
}


@pytest.mark.parametrize("mask", SINGLE_RULES.values(), ids=SINGLE_RULES)
def test_every_block_that_one_rule_hides_is_skipped(mask):
    whole = np.broadcast_to(True if mask.dense(8, 12) is None else mask.dense(8, 12), (2, 1, 8, 12))
    for rows, columns in itertools.product((1, 2, 4, 8), (1, 2, 3, 4, 6, 12)):
        expected = whole.reshape(2, 8 // rows, rows, 12 // columns, columns).any(axis=(0, 2, 4))
        np.testing.assert_array_equal(mask.visible_blocks(8, 12, rows, columns), expected, f"{rows} x {columns}")


@pytest.mark.parametrize(("prefix", "expected"), [((4, 2), (True, False, False)), ((5,), (True, True, False))])
def test_blocks_beyond_the_prefix_are_skipped_from_their_first_key_on(prefix, expected):
    mask = Mask(causal=True, prefix=jnp.array(prefix))
    assert tuple(mask.visible_blocks(4, 12, 4, 4)[0].tolist()) == expected


def array(shape: tuple[int, ...], low: int, high: int) -> st.SearchStrategy[np.ndarray]:
    """Draws integers from `low` to `high`, of which about none, half or all equal one of the two bounds."""

    def fill(seed: int, extreme: int, share: float) -> np.ndarray:
        draw = np.random.default_rng(seed)
        return np.where(draw.random(shape) < share, extreme, draw.integers(low, high + 1, shape)).astype(np.int32)

    return st.builds(fill, st.integers(0, 2**32 - 1), st.sampled_from([low, high]), st.sampled_from([0.0, 0.5, 1.0]))


def booleans(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Draws bool arrays of one shape, including all True and all False."""
    return array(shape, 0, 1).map(lambda values: values.astype(bool))


def rising(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Draws segment ids that do not decrease along each row."""
    return array(shape, 0, 2).map(lambda ids: np.sort(ids, axis=1))


def any_mask(T: int, S: int) -> st.SearchStrategy[Mask]:
    """Draws any combination of mask rules for two rows."""
    return st.builds(
        Mask,
        padding_mask=st.none() | booleans((2, S)),
        segments=st.none() | st.tuples(rising((2, T)), rising((2, S))),
        prefix=st.none() | array((2,), 0, S),
        positions=st.none() | st.tuples(array((2, T), 0, S), array((2, S), -1, S)),
        causal=st.booleans(),
        window=st.none() | st.integers(1, S),
    )


@pytest.mark.parametrize("mask", [np.zeros((1, 1, 2, 3), np.float32), np.ones((2, 3), bool), np.ones((1, 2, 3), bool)])
def test_additive_masks_and_masks_of_another_rank_are_refused(mask):
    with pytest.raises(UserError, match=r"an attention mask is a bool array \[B, N, T, S\] .*, not (float32|bool)"):
        as_mask(mask)
    q, k, v = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 3, 1, 4)), jnp.ones((1, 3, 1, 4))
    with pytest.raises(UserError, match="an attention mask is a bool array"):
        attend(q, k, v, mask)


@pytest.mark.parametrize("backend", ["reference", "xla", "blockwise"])
@pytest.mark.parametrize("shape", [(1, 1, 5, 6), (1, 1, 5, 4), (1, 1, 4, 5), (3, 1, 5, 5), (1, 2, 5, 5)])
def test_masks_of_other_sizes_are_refused(backend, shape):
    """Regression test: longer ones were cut without a word."""
    attention = nn.Attention(ModelConfig(dim=12, num_heads=3, attention_backend=backend))
    x = jnp.ones((2, 5, 12))
    params = attention.init(jax.random.key(0), x)
    with pytest.raises(UserError, match=rf"mask has the shape {re.escape(str(shape))}, .* to \(2, 3, 5, 5\)"):
        attention.apply(params, x, mask=jnp.ones(shape, bool))
    with pytest.raises(UserError, match="queries have 2 rows, but keys have 1"):
        attention.apply(params, x, x[:1])
