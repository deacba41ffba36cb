"""Slots and positions of key-value caches, compared with states written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, normal, rest_slow, tiny
from tformer_jax.nn.decoder_cache import DecoderCache, empty_cache
from tformer_jax.nn.kv_cache import KeyValues, LayerCache, Quantized
from tformer_jax.nn.row_slots import PagedSlots, RowSlots
from tformer_jax.nn.slots import EMPTY, BeamAncestry, DenseSlots, RingSlots, Tokens

allocate, extend = jax.jit(DecoderCache.allocate), jax.jit(KeyValues.extend)


def test_an_empty_cache_has_one_entry_per_layer():
    cache = empty_cache(tiny("decoder_lm", decoder_layers=3, num_kv_heads=2, dtype="bfloat16"), batch=2, length=5)
    assert len(cache.layers) == 3
    for layer in cache.layers:
        assert layer.self_attention.k.shape == layer.self_attention.v.shape == (2, 2, 5, 2)
        assert layer.self_attention.k.dtype == jnp.bfloat16
        assert layer.cross_attention is None
    assert (cache.slots["full"].tokens.positions == EMPTY).all()
    assert not cache.lengths.any()


@pytest.mark.parametrize("window", [2, 5, 9])
def test_window_layers_cache_only_their_window(window):
    cfg = tiny("decoder_lm", decoder_layers=2, window=window, layer_pattern=("window", "full"))
    cache = empty_cache(cfg, batch=1, length=6, width=3)
    assert [layer.self_attention.k.shape[2] for layer in cache.layers] == [3 * min(window, 6), 18]


def test_new_keys_fill_the_slots_from_the_index_on():
    old = KeyValues.pack(jnp.zeros((1, 5, 2, 3)), jnp.ones((1, 5, 2, 3)))
    new = normal(1, 2, 2, 3), normal(1, 2, 2, 3, seed=1)
    remaining, seen = extend(old, KeyValues.pack(*new), DenseSlots(Tokens.empty(1, 5), jnp.int32(4)))
    for before, added, now in zip(old.unpack("float32"), new, remaining.unpack("float32"), strict=True):
        np.testing.assert_array_equal(now[:, 2:4], added)
        np.testing.assert_array_equal(now[:, [0, 1, 4]], before[:, [0, 1, 4]])
    np.testing.assert_array_equal(seen.k, remaining.k)


@pytest.mark.parametrize("calls", [[1] * 7, [3, 1, 1, 1, 1], [5, 2, 1], [2, 7, 1]])
def test_a_ring_keeps_the_newest(calls):
    """Visible slots include the window; the kept slots hold the last tokens, once each, at their positions."""
    slots, ring = RingSlots.empty(1, window=3, width=1), jnp.full((1, 1, 3, 1), -7.0)
    read = 0

    @jax.jit
    def call(slots, ring, positions):
        slots, seen = slots.allocate(Tokens.of_call(positions))
        return slots, seen, *slots.extend(ring, positions[:, None, :, None].astype(jnp.float32))

    for T in calls:
        slots, seen, ring, attended = call(slots, ring, np.arange(read, read + T, dtype=np.int32)[None])
        read += T
        real = np.asarray(seen.positions[0]) != EMPTY
        np.testing.assert_array_equal(np.asarray(attended[0, 0, :, 0])[real], np.asarray(seen.positions[0])[real])
        assert set(range(max(read - T - 2, 0), read)) <= set(np.asarray(seen.positions[0])[real].tolist())
        remaining = np.asarray(slots.tokens.positions[0])
        assert sorted(remaining[remaining != EMPTY]) == list(range(max(read - 3, 0), read))
        np.testing.assert_array_equal(np.asarray(ring[0, 0, :, 0])[remaining != EMPTY], remaining[remaining != EMPTY])


def test_positions_count_real_tokens_only():
    cache = empty_cache(tiny("decoder_lm"), batch=2, length=6)
    cache, positions, seen = allocate(cache, np.array([[False, True, True], [True, True, True]]))
    np.testing.assert_array_equal(positions, [[0, 0, 1], [0, 1, 2]])
    np.testing.assert_array_equal(seen["full"].positions, [[-1, 0, 1, -1, -1, -1], [0, 1, 2, -1, -1, -1]])
    cache, positions, seen = allocate(cache, np.ones((2, 2), bool))
    np.testing.assert_array_equal(positions, [[2, 3], [3, 4]])
    np.testing.assert_array_equal(seen["full"].positions, [[-1, 0, 1, 2, 3, -1], [0, 1, 2, 3, 4, -1]])
    np.testing.assert_array_equal(cache.lengths, [4, 5])


def test_beams_share_a_position():
    cache = empty_cache(tiny("decoder_lm"), batch=2, length=4, width=2)
    cache, _, _ = allocate(cache, np.array([[False, True], [True, True]]))
    ancestry = BeamAncestry(jnp.array([[[0], [1]]] * 2), start=jnp.array([1, 2]))
    cache, positions, seen = allocate(cache, np.ones((2, 2), bool), ancestry)
    np.testing.assert_array_equal(positions, [[1, 1], [2, 2]])
    np.testing.assert_array_equal(seen["full"].positions[:, :4], [[-1, 0, 1, 1], [0, 1, 2, 2]])
    np.testing.assert_array_equal(seen["full"].columns[:, :4], [[0, 1, 0, 1]] * 2)
    np.testing.assert_array_equal(cache.lengths, [2, 3])


def test_a_beam_attends_to_its_ancestors():
    """After a prompt of one token, two beams: at the second step, both continue beam 1 of the first."""
    keys = Tokens(jnp.array([[0, 1, 1, 2, 2]]), jnp.array([[0, 0, 1, 0, 1]]))
    ancestry = BeamAncestry(ancestors=jnp.array([[[1, 0, 0], [1, 1, 0]]]), start=jnp.array([1]))
    np.testing.assert_array_equal(
        ancestry.may_attend(keys)[0, 0], [[True, False, True, True, False], [True, False, True, False, True]]
    )


def beams_of_two_rows(pages: bool):
    """After a prompt of one token, both beams of row 0 continue beam 1 of the first step; row 1 has ended."""
    tokens = Tokens(jnp.array([[0, 1, 1, EMPTY, EMPTY, EMPTY]] * 2), jnp.array([[0, 0, 1, 0, 0, 0]] * 2))
    slots = RowSlots(tokens, jnp.array([3, 3]), jnp.zeros((2, 0), jnp.int32))
    if pages:  # pages of two slots
        slots = PagedSlots(slots.tokens, slots.index, slots.added, jnp.array([[1, 3, 5], [2, 4, 0]]))
    ancestry = BeamAncestry(ancestors=jnp.array([[[1, 0, 0], [1, 1, 0]]] * 2), start=jnp.array([1, 1]))
    layer = LayerCache(KeyValues(jnp.zeros((7, 1, 2, 1) if pages else (2, 1, 6, 1)), jnp.zeros(())), None)
    return DecoderCache((layer,), {"full": slots}, None, jnp.array([2, 2])), ancestry


@pytest.mark.parametrize("pages", [False, True])
def test_beams_take_the_slots_of_tokens_without_running_descendants(pages):
    before, ancestry = beams_of_two_rows(pages)
    cache, positions, seen = allocate(before, jnp.array([[True, True], [False, False]]), ancestry)
    np.testing.assert_array_equal(positions[0], [2, 2])
    slots = cache.slots["full"]
    np.testing.assert_array_equal(slots.added, [[1, 3], [6, 6]])
    np.testing.assert_array_equal(slots.index, [4, 3])
    np.testing.assert_array_equal(seen["full"].positions, [[0, 2, 1, 2, EMPTY, EMPTY], [0, 1, 1] + 3 * [EMPTY]])
    np.testing.assert_array_equal(seen["full"].columns[0, :4], [0, 0, 1, 1])
    attended = ancestry.may_attend(seen["full"])[0, 0, :, :4]
    np.testing.assert_array_equal(attended, [[True, True, True, False], [True, False, True, True]])


def test_the_last_slots_in_use_are_counted():
    """The tokens in slots 1 and 3 have no running descendants; the new ones take these."""
    tokens = Tokens(jnp.array([[0, 1, 1, 2, 2, EMPTY]]), jnp.array([[0, 0, 1, 0, 1, 0]]))
    slots = RowSlots(tokens, jnp.array([5]), jnp.zeros((1, 0), jnp.int32))
    ancestry = BeamAncestry(ancestors=jnp.array([[[1, 1, 0], [1, 1, 1]]]), start=jnp.array([1]))
    slots, _ = jax.jit(RowSlots.allocate)(slots, Tokens.of_call(jnp.array([[3, 3]])), ancestry)
    np.testing.assert_array_equal(slots.added, [[1, 3]])
    np.testing.assert_array_equal(slots.index, [5])


@pytest.mark.parametrize(
    ("pages", "room"),
    [(False, {3: [True, True], 4: [False, False]}), (True, {1: [True, True], 2: [True, False], 4: [False, False]})],
)
def test_a_row_has_room_for_the_slots_of_its_pages(pages, room):
    cache, _ = beams_of_two_rows(pages)
    for count, expected in room.items():
        np.testing.assert_array_equal(cache.has_room(count), expected)


@pytest.mark.parametrize("pages", [False, True])
def test_beams_in_reused_slots_attend_to_their_ancestors(pages):
    """Random lineages of 3 beams over 30 steps, against lists of ancestors; the slots do not grow with the steps."""
    random, k = np.random.default_rng(0), 3
    slots = RowSlots.empty(1, 64)
    if pages:
        slots = PagedSlots.without_pages(1, pages=16, size=4).set_tables(jnp.array([0]), jnp.arange(1, 17)[None])
    lineages, ancestors, contents = [[(0, 0)]] * k, np.zeros((1, k, 40), np.int32), {}
    step, most = jax.jit(type(slots).allocate), 0
    slots, _ = step(slots, Tokens.of_call(jnp.array([[0]])))
    contents[0] = (0, 0)
    for position in range(1, 31):
        parents = random.integers(0, k, k)
        ancestors[0] = ancestors[0, parents]
        ancestors[0, :, position - 1] = np.arange(k)
        lineages = [[*lineages[parent], (position, beam)] for beam, parent in enumerate(parents)]
        ancestry = BeamAncestry(jnp.array(ancestors), jnp.array([1]))
        slots, seen = step(slots, Tokens.of_call(jnp.full((1, k), position)), ancestry)
        contents |= {int(slot): (position, beam) for beam, slot in enumerate(slots.added[0])}
        mask = np.asarray(ancestry.may_attend(seen)[0, 0]) & (np.asarray(seen.positions) != EMPTY)
        for beam, lineage in enumerate(lineages):
            assert sorted(contents[slot] for slot in np.flatnonzero(mask[beam])) == lineage
        live = {token for lineage in lineages for token in lineage}
        most = max(most, len(live | {contents[int(slot)] for slot in slots.added[0]}))
        slots = slots.end_call()
    assert int(slots.index[0]) <= most + k < 3 * k + 31


def keys_of_row(keys: KeyValues, slots: RowSlots, row: int) -> np.ndarray:
    """Returns the keys [S, K, H] in the slots of a row, read through its table of pages if it has one."""
    k = np.asarray(keys.unpack("float32")[0])
    return np.concatenate(k[np.asarray(slots.table[row])]) if isinstance(slots, PagedSlots) else k[row]


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_slow([(True, "int8"), (False, "float32"), (True, "float32"), (False, "int8")], 2))
def test_a_forked_row_reads_the_keys_of_its_source(case):
    """Row 1 shares the full page of row 0 and gets a copy of the partly filled one; dense rows are copied whole."""
    paged, dtype = case
    slots, copies = RowSlots.empty(2, 8), jnp.zeros((1, 2), jnp.int32)
    if paged:
        slots = PagedSlots.without_pages(2, pages=2, size=4).set_tables(jnp.array([0]), jnp.array([[1, 2]]))
        copies = jnp.array([[2, 4]])
    shape = (5, 4, 2, 3) if paged else (2, 8, 2, 3)
    cache = KeyValues.pack(normal(*shape), normal(*shape, seed=1)).stored(dtype)
    positions = jnp.array([[0, 1, 2, 3, 4], [EMPTY] * 5])
    slots, _ = slots.allocate(Tokens.of_call(positions))
    cache, _ = cache.extend(KeyValues.pack(normal(2, 5, 2, 3, seed=2), normal(2, 5, 2, 3, seed=3)), slots)
    slots = slots.end_call()
    before = keys_of_row(cache, slots, 0)
    forked = cache.fork(slots, jnp.int32(0), jnp.int32(1), copies)
    after = slots.fork(jnp.int32(0), jnp.int32(1), jnp.array([1, 4]))
    for row in (0, 1):
        np.testing.assert_array_equal(keys_of_row(forked, after, row)[:5], before[:5])
    assert after.index.tolist() == [5, 5]
    after, _ = after.allocate(Tokens.of_call(jnp.array([[EMPTY], [5]])))
    written, _ = forked.extend(KeyValues.pack(normal(2, 1, 2, 3, seed=4), normal(2, 1, 2, 3, seed=5)), after)
    np.testing.assert_array_equal(keys_of_row(written, after, 0), keys_of_row(forked, after, 0))
    assert (keys_of_row(written, after, 1)[5] != keys_of_row(forked, after, 1)[5]).any()


def test_int8_is_within_half_a_step():
    x = normal(2, 3, 4, 8) * jnp.array([1.0, 1e-3, 1e3, 0.0])[:, None]
    stored = jax.jit(Quantized.quantize)(x)
    assert stored.values.dtype == jnp.int8
    step = np.abs(np.asarray(x, np.float64)).max(axis=-1, keepdims=True) / 127
    assert (np.abs(np.asarray(stored.astype("float32"), np.float64) - x) <= step * 0.5001).all()
    np.testing.assert_allclose(stored.scale, step, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "bytes_a_number"), [("float32", 4), ("bfloat16", 2), ("int8", 1 + 4 / 2)])
def test_bytes_of_a_cache(dtype, bytes_a_number):
    cache = empty_cache(tiny("decoder_lm"), batch=3, length=5, dtype=dtype)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers)) == 2 * 3 * 5 * 4 * 2 * bytes_a_number


def test_low_precision_storage_rounds_values():
    old = KeyValues.pack(jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 2, 8))).stored("int8")
    k, v = normal(1, 2, 2, 8), normal(1, 2, 2, 8, seed=1)
    remaining, _ = extend(old, KeyValues.pack(k, v), DenseSlots(Tokens.empty(1, 4), jnp.int32(2)))
    for read, written in zip(remaining.unpack("float32"), (k, v), strict=True):
        assert_close(read[:, :2], written, 0.5 / 127)
        assert not read[:, 2:].any()
