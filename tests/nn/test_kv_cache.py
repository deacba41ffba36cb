"""The cache's bookkeeping, by hand."""

import jax.numpy as jnp
import numpy as np

from tests.helpers import normal, tiny
from tformer_jax.nn.kv_cache import KeyValues, empty_cache


def test_an_empty_cache_has_one_entry_a_layer():
    cache = empty_cache(tiny("decoder_lm", decoder_layers=3, num_kv_heads=2, dtype="bfloat16"), batch=2, length=5)
    assert len(cache.layers) == 3
    for layer in cache.layers:
        assert layer.self_attention.k.shape == layer.self_attention.v.shape == (2, 2, 5, 2)
        assert layer.self_attention.k.dtype == jnp.bfloat16
        assert layer.cross_attention is None
    assert not cache.valid.any()
    assert cache.index == 0


def test_new_keys_fill_the_slots_from_the_index_on():
    old = jnp.zeros((1, 5, 2, 3)), jnp.ones((1, 5, 2, 3))
    new = normal(1, 2, 2, 3), normal(1, 2, 2, 3, seed=1)
    written = KeyValues.pack(*old).write(KeyValues.pack(*new), 2).unpack()
    for before, added, now in zip(old, new, written, strict=True):
        np.testing.assert_array_equal(now[:, 2:4], added)
        np.testing.assert_array_equal(now[:, [0, 1, 4]], before[:, [0, 1, 4]])


def test_positions_count_real_tokens_only():
    cache = empty_cache(tiny("decoder_lm"), batch=2, length=6)
    cache, positions, mask = cache.admit(jnp.array([[False, True, True], [True, True, True]]))
    np.testing.assert_array_equal(positions, [[0, 0, 1], [0, 1, 2]])
    np.testing.assert_array_equal(mask.dense(3, 6)[0, 0, 2], [False, True, True, False, False, False])
    cache, positions, mask = cache.admit(jnp.ones((2, 2), bool))
    np.testing.assert_array_equal(positions, [[2, 3], [3, 4]])
    np.testing.assert_array_equal(
        mask.dense(2, 6)[0, 0], [[False, True, True, True, False, False], [False, *[True] * 4, False]]
    )
    np.testing.assert_array_equal(cache.valid, [[False, *[True] * 4, False], [*[True] * 5, False]])
    np.testing.assert_array_equal(cache.lengths, [4, 5])
    assert cache.index == 5
