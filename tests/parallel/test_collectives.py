"""The collectives of a train step, read from the compiled program.

XLA for CPUs leaves an all-reduce where each device needs a part of the sum; other devices make a reduce-scatter of it.
"""

import dataclasses
import functools
import math

import jax
import pytest
from flax import linen as nn

from tests.parallel.hlo import collectives
from tests.parallel.test_presets import batch, config
from tformer_jax.config import Config
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import jitted, make_train_step

D, V, ROWS, T = 16, 24, 8, 8


def lowered(cfg: Config):
    mesh, model = make_mesh(cfg.parallel), registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    start = state.abstract(model, optimizer, cfg, mesh)
    where = rules.batch_sharding(mesh)
    rows = {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for key, x in batch(cfg, 0).items()}
    return jitted(make_train_step(model, optimizer, cfg), start, mesh).lower(start, rows)


def plain(cfg: Config) -> Config:
    """Returns the config without moments and averages: their updates send nothing, and take long to compile."""
    optim = dataclasses.replace(cfg.optim, optimizer="sgd", beta1=0.0)
    return dataclasses.replace(cfg, optim=optim, train=dataclasses.replace(cfg.train, ema_decay=None))


@functools.cache
def sent(kind: str, preset: str):
    cfg = config(kind, preset=preset)
    if preset != "zero1":  # whose gathers follow from sharded moments
        cfg = plain(cfg)
    return collectives(lowered(cfg).compile().as_text())


def of_kind(actual, kind: str, least: int = 2):
    """Returns the result shapes of one kind of collective, without scalars."""
    return [shape for each in actual if each.kind == kind for shape in each.shapes if math.prod(shape) >= least]


def parameters(kind: str) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(nn.unbox(registry.shapes(registry.build(config(kind).model))))]


def numbers(shapes) -> int:
    return sum(map(math.prod, shapes))


@pytest.mark.slow
def test_data_parallel_sums_each_gradient_once():
    actual = sent("decoder_lm", "dp")
    assert {each.kind for each in actual} == {"all-reduce"}
    assert (
        numbers(of_kind(actual, "all-reduce")) == numbers(parameters("decoder_lm")) + V * D
    )  # tied: read in two places


@pytest.mark.long
def test_tensor_parallel_sums_activations_and_never_gathers():
    actual = sent("decoder_lm", "tp")
    assert {each.kind for each in actual} == {"all-reduce"}
    activations = of_kind(actual, "all-reduce", least=D + 1)
    whole = [shape for shape in activations if math.prod(shape) == ROWS * T * D and shape[-1] == D]
    # embedding, attention and FFN forward; logits, FFN and (three together) query, key and value backward
    assert len(whole) == 3 + 2 + 3
    assert all(math.prod(shape) <= ROWS * T for shape in activations if shape not in whole)  # statistics of the loss


@pytest.mark.long
def test_fsdp_gathers_each_matrix_once_and_nothing_larger():
    actual = sent("decoder_lm", "fsdp")
    matrices = [shape for shape in parameters("decoder_lm") if len(shape) > 1]
    gathered = of_kind(actual, "all-gather")
    assert sorted(map(math.prod, gathered)) == sorted(map(math.prod, matrices))
    summed = of_kind(actual, "all-reduce") + of_kind(actual, "reduce-scatter")
    assert numbers(summed) == numbers(parameters("decoder_lm")) + V * D


@pytest.mark.slow
def test_zero1_gathers_updated_parameters():
    actual = sent("decoder_lm", "zero1")
    matrices = [shape for shape in parameters("decoder_lm") if len(shape) > 1]
    gathered = [each for each in actual if each.kind == "all-gather" and each.shapes]
    assert sorted(each.largest for each in gathered) == sorted(map(math.prod, matrices))
    assert not any("jvp" in each.name for each in gathered)  # after the update, not before a product


@pytest.mark.slow
def test_fsdp_with_tensor_parallelism_gathers_only_parts_of_matrices():
    gathered = of_kind(sent("decoder_lm", "fsdp+tp"), "all-gather")
    matrices = [math.prod(shape) // 2 for shape in parameters("decoder_lm") if len(shape) > 1]
    assert sorted(map(math.prod, gathered)) == sorted(matrices)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seq2seq", "classifier"])
def test_tensor_parallel_gathers_no_parameters_in_any_family(kind):
    assert not of_kind(sent(kind, "tp"), "all-gather", least=4 * D)


@pytest.mark.slow
def test_scanned_layers_are_gathered_one_at_a_time():
    cfg = plain(config("decoder_lm", preset="fsdp"))
    model = dataclasses.replace(cfg.model, scan_layers=True, decoder_layers=3, remat="nothing_saveable")
    actual = collectives(lowered(dataclasses.replace(cfg, model=model)).compile().as_text())
    assert all(math.prod(shape) <= V * D for shape in of_kind(actual, "all-gather"))
