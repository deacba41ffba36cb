"""Ring attention on a mesh of simulated devices equals the formula, and each device holds a part of the keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.helpers import assert_close, normal, rest_slow, tiny
from tests.nn.test_masks import array, booleans, rising
from tests.parallel.hlo import collectives
from tformer_jax.base.errors import UserError
from tformer_jax.config import ParallelConfig
from tformer_jax.models import registry
from tformer_jax.nn.attention_ops import Operands, Scoring
from tformer_jax.nn.attention_ops.blockwise import blockwise
from tformer_jax.nn.attention_ops.reference import reference
from tformer_jax.nn.attention_ops.ring import ring
from tformer_jax.nn.attention_positions import AlibiBias, BucketBias
from tformer_jax.nn.masks import Mask
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh

ROWS = {"data": 2, "sequence": 4}
BOTH = {"fsdp": 2, "sequence": 2, "tensor": 2}
ALL = {"sequence": 8}
MESHES = {"rows": ROWS, "rows and heads": BOTH, "all": ALL}
HEADS = {"heads": {"sequence": 2, "tensor": 4}}
ALIBI = AlibiBias(jnp.array([1.0, 0.5, 0.25, 0.1]))
TABLE = BucketBias(normal(8, 4, seed=9), bidirectional=True, farthest=6)
PLAIN = Scoring(0.5, None, 0.0)
CAPPED = Scoring(0.7, 1.5, 0.0)
REFERENCE = ("attention_backend=ring, 8 devices", "reference backend")
small_blocks, larger_blocks = functools.partial(ring, block=3), functools.partial(ring, block=64)


def on_mesh(sizes: dict[str, int], run):
    """Returns a mesh, and `run` jitted for it."""
    mesh = make_mesh(ParallelConfig(**{"data": 1} | sizes))

    def traced(*arguments):
        with rules.use_mesh(mesh):
            return run(*arguments)

    return mesh, jax.jit(traced)


def inputs(T: int, S: int, N: int = 4, K: int = 2, B: int = 2):
    return normal(B, T, N, 3), normal(B, S, K, 3, seed=1), normal(B, S, K, 3, seed=2)


def passes(run, scoring: Scoring = PLAIN, **static):
    """Returns a function from (q, k, v, bias, mask arrays) to the result and the gradients of q, k, v and bias."""

    def both(q, k, v, bias, arrays):
        mask = Mask(**static, **arrays)
        out, pull = jax.vjp(lambda q, k, v, bias: run(Operands(q, k, v, mask, scoring, bias)), q, k, v, bias)
        return out, *pull(normal(*q.shape, seed=5).astype(out.dtype))

    return both


@functools.cache
def compiled(mesh: str, scoring: Scoring, **static):
    devices, run = on_mesh((MESHES | HEADS)[mesh], passes(small_blocks, scoring, **static))
    return rules.replicated(devices), run, jax.jit(passes(reference, scoring, **static))


def check(mesh: str, qkv, bias=None, arrays=None, scoring: Scoring = PLAIN, **static):
    """Compiles the result and the gradients on the mesh, and those of the formula that they must equal."""
    everywhere, run, expected = compiled(mesh, scoring, **static)
    arguments = (*qkv, bias, arrays or {})
    actual = run(*jax.device_put(arguments, everywhere))
    parts, wanted = jax.tree.leaves(actual), jax.tree.leaves(expected(*arguments))
    for part, other in zip(parts, wanted, strict=True):
        assert_close(part, other, proves=REFERENCE)
    return actual


@pytest.mark.parametrize("mesh", rest_slow(MESHES.keys(), 1))
@pytest.mark.parametrize("static", rest_slow([{"causal": True, "window": 5}, {}, {"causal": True}, {"window": 3}], 0))
def test_masks_without_arrays(mesh, static):
    check(mesh, inputs(16, 16), **static)


RULES = {
    "causal window with bias and soft-cap, GQA": (8, 24, 2, {"causal": True, "window": 5}, ALIBI, CAPPED),
    "window in both directions, MQA": (24, 16, 1, {"window": 6}, TABLE, PLAIN),
    "both directions with bias": (8, 32, 4, {}, TABLE, CAPPED),
    "causal": (16, 16, 4, {"causal": True}, None, PLAIN),
}


@pytest.mark.long
@pytest.mark.parametrize("mesh", rest_slow(MESHES.keys(), 1))
@pytest.mark.parametrize("rule", rest_slow(RULES.keys(), 1))
@settings(max_examples=15)
@given(data=st.data())
def test_every_mask(rule, mesh, data):
    T, S, K, static, bias, scoring = RULES[rule]
    arrays = {
        "padding_mask": data.draw(booleans((2, S))),
        "segments": (data.draw(rising((2, T))), data.draw(rising((2, S)))),
        "prefix": data.draw(array((2,), 0, S)),
        "positions": (data.draw(array((2, T), 0, S)), data.draw(array((2, S), -1, S))),
    }
    check(mesh, inputs(T, S, K=K), bias, arrays, scoring, **static)


ARRAYS = {
    "padding_mask": {"padding_mask": np.arange(16) < np.array([[16], [5]])},
    "segments": {"segments": 2 * (np.array([[0] * 3 + [1] * 9 + [2] * 4, [0] * 8 + [1] * 8]),)},
    "prefix": {"prefix": np.array([7, 0])},
    "positions of one row for all": {"positions": 2 * (np.arange(16)[None] + 3,)},
}


@pytest.mark.parametrize("mesh", rest_slow(MESHES.keys(), 1))
@pytest.mark.parametrize("name", rest_slow(["segments", "positions of one row for all", "padding_mask", "prefix"], 0))
def test_each_rule_with_a_causal_mask(mesh, name):
    check(mesh, inputs(16, 16), TABLE, ARRAYS[name], causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES | HEADS)
def test_sinks_are_those_of_the_heads_of_a_device(mesh):
    def both(run):
        def traced(*arguments):
            attend = lambda q, k, v, sinks: run(Operands(q, k, v, Mask(causal=True), PLAIN, sinks=sinks))  # noqa: E731
            out, pull = jax.vjp(attend, *arguments)
            return out, *pull(normal(*out.shape, seed=5))

        return traced

    arguments = *inputs(16, 16), normal(4, seed=6)
    devices, run = on_mesh((MESHES | HEADS)[mesh], both(small_blocks))
    actual = run(*jax.device_put(arguments, rules.replicated(devices)))
    for part, expected in zip(actual, jax.jit(both(reference))(*arguments), strict=True):
        assert_close(part, expected)


TWELVE = {"table": BucketBias(normal(8, 12), True, 9), "none": None, "alibi": AlibiBias(normal(12, seed=4) ** 2)}


@pytest.mark.long
@pytest.mark.parametrize("bias", rest_slow(TWELVE.keys(), 1))
@pytest.mark.parametrize("K", rest_slow([3, 1, 12, 6, 4, 2], 1))
@pytest.mark.parametrize("mesh", rest_slow(["heads", "rows and heads"], 1))
def test_heads_read_their_own_keys_and_bias(mesh, K, bias):
    """Four devices cannot split 6, 3, 2 or 1 key/value heads evenly, but they can split the 12 query heads."""
    check(mesh, inputs(8, 8, 12, K), TWELVE[bias], causal=True)


def test_positions_for_a_bias_are_those_of_the_whole_row():
    """By hand: with equal keys, the weights are the softmax of minus the distance to the key."""
    q, k, v = jnp.zeros((2, 8, 1, 8)), jnp.zeros((2, 8, 1, 8)), jnp.tile(jnp.eye(8)[:, None], (2, 1, 1, 1))
    mesh, run = on_mesh(ROWS, lambda q, k, v, bias: ring(Operands(q, k, v, Mask(), PLAIN, bias)))
    out = run(*jax.device_put((q, k, v, AlibiBias(jnp.ones(1))), rules.replicated(mesh)))
    weights = np.exp(-abs(np.arange(8)[:, None] - np.arange(8)))
    assert_close(out[1, :, 0], weights / weights.sum(axis=1, keepdims=True), 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mesh", rest_slow(MESHES.keys(), 1))
def test_fully_masked_rows_have_zero_values_and_gradients(mesh):
    qkv, segments = inputs(16, 16), jnp.array([[9] * 2 + [1] * 14, [1] * 14 + [9] * 2])
    arrays = {
        "segments": (segments, jnp.ones((2, 16), jnp.int32)),
        "padding_mask": jnp.arange(16)[None] < jnp.array([[16], [0]]),
    }
    out, *gradients = check(mesh, qkv, arrays=arrays)
    for array_of_queries in (out, gradients[0]):
        np.testing.assert_array_equal(array_of_queries[0, :2], 0)
        np.testing.assert_array_equal(array_of_queries[1], 0)
        assert np.abs(array_of_queries[0, 2:]).min(axis=(1, 2)).max() > 0
    for gradient in gradients[1:3]:
        np.testing.assert_array_equal(gradient[1], 0)


@pytest.mark.long
def test_a_batch_that_does_not_divide_is_replicated():
    check(
        "rows",
        inputs(8, 8, B=3),
        TABLE,
        {"padding_mask": jnp.arange(8)[None] < jnp.array([[8], [6], [3]])},
        causal=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("lengths", rest_slow([(7, 5), (6, 8), (8, 6), (1, 8)], 1))
def test_lengths_that_do_not_divide_are_replicated(lengths):
    check("rows", inputs(*lengths), ALIBI, causal=True)


def test_an_explicit_mask():
    explicit = jnp.asarray(np.random.default_rng(3).random((2, 4, 8, 8)) < 0.5)
    check("rows", inputs(8, 8), arrays={"explicit": explicit}, causal=True)


PADDED = {"padding_mask": jnp.arange(8)[None] < jnp.array([[8], [5]])}


@pytest.mark.long
@pytest.mark.parametrize("sizes", rest_slow([{"data": 2, "tensor": 2}, {}], 1))
def test_without_a_sequence_axis_it_equals_blockwise_bit_for_bit(sizes):
    arguments = (*inputs(8, 8), ALIBI, PADDED)
    mesh, run = on_mesh(sizes, passes(small_blocks, causal=True))
    _, plain = on_mesh(sizes, passes(functools.partial(blockwise, block=3), causal=True))
    arguments = jax.device_put(arguments, rules.replicated(mesh))
    for part, other in zip(jax.tree.leaves(run(*arguments)), jax.tree.leaves(plain(*arguments)), strict=True):
        np.testing.assert_array_equal(part, other)
    assert "permute" not in run.lower(*arguments).as_text()


def test_without_a_mesh():
    arguments = (*inputs(8, 8), ALIBI, PADDED)
    actual, expected = (jax.jit(passes(run, causal=True))(*arguments) for run in (ring, reference))
    for part, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(part, other)


@pytest.mark.long
def test_keys_hidden_from_a_device_are_skipped():
    """NaN spreads through masked scores, so only the device that attends to the last keys may return it."""
    q, k, v = inputs(16, 16)
    mesh, run = on_mesh(ROWS, passes(small_blocks, causal=True))
    broken = jax.device_put((q, k.at[:, 12:].set(jnp.nan), v.at[:, 12:].set(jnp.nan), None, {}), rules.replicated(mesh))
    out, d_q, *_ = run(*broken)
    whole = jax.jit(passes(reference, causal=True))(q, k, v, None, {})
    assert np.isnan(out[:, 12:]).all()
    for actual, expected in ((out, whole[0]), (d_q, whole[1])):
        assert_close(actual[:, :12], expected[:, :12])


@pytest.mark.long
@pytest.mark.parametrize("mesh", rest_slow(MESHES.keys(), 1))
def test_bfloat16(mesh):
    qkv = tuple(x.astype(jnp.bfloat16) for x in inputs(16, 16))
    everywhere, run, expected = compiled(mesh, CAPPED, causal=True)
    actual = run(*jax.device_put((*qkv, TABLE, {}), everywhere))
    assert [leaf.dtype for leaf in actual[:4]] == [jnp.bfloat16] * 4
    exact = expected(*(x.astype(jnp.float32) for x in qkv), TABLE, {})
    for part, other in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        assert_close(part.astype(jnp.float32), other, 2**-6)


def test_attention_dropout_is_refused():
    sentence = (
        "'ring' cannot drop attention weights .model.attention_dropout.; write one of auto, reference, blockwise$"
    )
    with pytest.raises(UserError, match=sentence):
        registry.build(tiny("decoder_lm", attention_backend="ring", attention_dropout=0.1), train=True)


@functools.cache
def planned(T: int, run=larger_blocks, **sizes: int):
    """Compiles the gradient for sharded rows of T tokens."""
    mesh, both = on_mesh(sizes, passes(run, causal=True))
    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence", "tensor"))
    shape = jax.ShapeDtypeStruct((2, T, 2, 8), jnp.float32, sharding=where)
    real = jax.ShapeDtypeStruct((2, T), bool, sharding=NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence")))
    return both.lower(shape, shape, shape, None, {"padding_mask": real}).compile()


@pytest.mark.parametrize("sizes", rest_slow([BOTH, ROWS, ALL], 1))
def test_keys_are_permuted_and_nothing_is_gathered(sizes):
    actual = collectives(planned(1024, **sizes).as_text())
    assert {each.kind for each in actual} == {"collective-permute"}
    T, N, B = (
        1024 // sizes["sequence"],
        2 // sizes.get("tensor", 1),
        2 * sizes["sequence"] * sizes.get("tensor", 1) // 8,
    )
    sent = [shape for each in actual for shape in each.shapes]
    assert sorted(sent) == sorted([(B, N, T, 8)] * 4 + [(B, N, 8, T)] * 2)  # k and v in each pass, and their gradients


@pytest.mark.slow
def test_memory_per_device_grows_with_its_part_of_a_row():
    def temporary(T: int, **options) -> int:
        return planned(T, **options).memory_analysis().temp_size_in_bytes

    short, middle, long = (temporary(T, sequence=8) for T in (2048, 4096, 8192))
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.02)  # a constant, and a part linear in T
    assert temporary(4096, sequence=4) == pytest.approx(long, rel=0.02)  # equal numbers of tokens per device
    assert middle < temporary(4096, run=reference, sequence=8) / 50
