"""tokamax's attention, with its implementations for any device: masks, soft-caps and shared heads, and a mesh."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.helpers import assert_close, normal, on_platform, rest_slow, tiny
from tests.nn import test_splash
from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.config import ParallelConfig
from tformer_jax.models import registry
from tformer_jax.nn.attention_ops import Operands, Scoring, reference, tokamax
from tformer_jax.nn.masks import Mask
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh

T = test_splash.T
CASES = {
    **test_splash.CASES,
    "cross, causal": (Mask(causal=True), 40, None),
    "prefix": (Mask(causal=True, prefix=np.array([3, 70]), self_attention=True), T, None),
    "explicit": (Mask(explicit=normal(2, 1, T, T) > 0, self_attention=True), T, 1.5),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", rest_slow(["xla", "xla_chunked"], 1))
def test_equals_the_reference(case, implementation):
    pytest.importorskip("tokamax", reason="needs Python 3.12 or later")
    of_tokamax = functools.partial(tokamax.tokamax, implementation=implementation)
    actual, expected = (test_splash.both_passes(run, *CASES[case]) for run in (of_tokamax, reference.reference))
    for each, other in zip(actual, expected, strict=True):
        assert_close(each, other, 1e-5)


def test_rows_and_heads_are_sharded_over_the_mesh():
    pytest.importorskip("tokamax", reason="needs Python 3.12 or later")
    mesh = make_mesh(ParallelConfig(data=2, tensor=4))

    def run(q, k, v):
        with rules.use_mesh(mesh):
            operands = Operands(q, k, v, Mask(causal=True, self_attention=True), Scoring(0.25, None, 0.0))
            return tokamax.tokamax(operands, implementation="xla")

    arguments = [normal(2, 16, 4, 8, seed=seed) for seed in range(3)]
    where = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    actual = jax.jit(run)(*(jax.device_put(array, where) for array in arguments))
    assert actual.sharding.spec == PartitionSpec("data", None, "tensor")
    plain = Operands(*arguments, Mask(causal=True, self_attention=True), Scoring(0.25, None, 0.0))
    assert_close(actual, reference.reference(plain), 1e-5)


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(checks, "not_installed", list)
    sentence = r"'tokamax' needs tokamax: pip install -e '.\[tokamax\]', with Python 3.12 or later; write one of auto,"
    with on_platform("gpu"), pytest.raises(UserError, match=sentence):
        registry.build(tiny("decoder_lm", attention_backend="tokamax"))
