"""Splash attention in interpret mode: every mask that it supports, and rows and heads sharded over a mesh."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.helpers import assert_close, normal, rest_slow
from tformer_jax.config import ParallelConfig
from tformer_jax.nn.attention_ops import Operands, Scoring, reference, splash
from tformer_jax.nn.masks import Mask
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh

T = 130
"""Not a multiple of the kernel's lanes."""
REAL = np.arange(T) < np.array([[T], [5]])
SEGMENTS = np.arange(T)[None] // np.array([[30], [70]])
CASES = {
    "causal": (Mask(causal=True, self_attention=True), T, None),
    "padding, both directions": (Mask(padding_mask=REAL, self_attention=True), T, None),
    "padding before the first key": (Mask(padding_mask=~REAL, causal=True, self_attention=True), T, 2.0),
    "window in both directions, soft-cap": (Mask(window=9, self_attention=True), T, 1.5),
    "cross": (Mask(padding_mask=np.arange(40) < np.array([[40], [0]])), 40, None),
    "packed, causal window": (
        Mask(causal=True, window=7, segments=(SEGMENTS, SEGMENTS), self_attention=True),
        T,
        None,
    ),
}


def both_passes(run, mask, S, softcap, K=2):
    q, k, v = normal(2, T, 4, 16), normal(2, S, K, 16, seed=1), normal(2, S, K, 16, seed=2)

    def out(q, k, v):
        return run(Operands(q, k, v, mask, Scoring(0.25, softcap, 0.0)))

    actual, pull = jax.vjp(out, q, k, v)
    return actual, *pull(normal(*q.shape, seed=3))


@pytest.mark.parametrize("case", rest_slow(CASES.keys(), 0))
def test_equals_the_reference(case):
    interpreted = functools.partial(splash.splash, interpret=True)
    actual, expected = (both_passes(run, *CASES[case]) for run in (interpreted, reference.reference))
    proves = ("attention_backend=splash (TPU kernel, interpreted), values and gradients", "reference backend")
    for each, other in zip(actual, expected, strict=True):
        assert_close(each, other, 1e-5, proves=proves)


@pytest.mark.long
@pytest.mark.parametrize("K", rest_slow([1, 4], 1))
def test_rows_and_heads_are_sharded_over_the_mesh(K):
    """Each device runs the kernel on its own rows and heads; only a single key/value head is gathered."""
    mesh = make_mesh(ParallelConfig(data=2, tensor=4))

    def run(q, k, v, segments):
        mask = Mask(causal=True, segments=(segments, segments), self_attention=True)
        with rules.use_mesh(mesh):
            return splash.splash(Operands(q, k, v, mask, Scoring(0.25, None, 0.0)), interpret=True)

    q, k, v = normal(2, 128, 4, 16), normal(2, 128, K, 16, seed=1), normal(2, 128, K, 16, seed=2)
    segments = jax.device_put(SEGMENTS[:, :128], NamedSharding(mesh, PartitionSpec("data")))
    arguments = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None, "tensor" if x.shape[2] == 4 else None)))
        for x in (q, k, v)
    ]
    program = jax.jit(run).lower(*arguments, segments).compile()
    assert "all-gather" not in program.as_text()
    actual = program(*arguments, segments)
    assert actual.sharding.spec == PartitionSpec("data", None, "tensor")

    @jax.jit
    def expected(q, k, v, segments):
        mask = Mask(causal=True, segments=(segments, segments), self_attention=True)
        return reference.reference(Operands(q, k, v, mask, Scoring(0.25, None, 0.0)))

    assert_close(actual, expected(q, k, v, SEGMENTS[:, :128]), 1e-5)
