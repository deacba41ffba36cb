"""Distillation: the loss and its gradients in NumPy, and on a mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, build, tiny
from tests.train.test_step import batch, settings
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ModelConfig, ParallelConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.models.losses import Teacher, TopLogits, batch_loss, divergence
from tformer_jax.parallel import placement
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.special_tokens import IGNORED, PAD
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import jitted, make_train_step

WEIGHT, TEMPERATURE = 0.3, 2.5
STUDENT, LARGER = tiny("decoder_lm"), tiny("decoder_lm", dim=12, decoder_layers=2, num_kv_heads=2)


def taught_by(cfg: ModelConfig, seed: int = 5) -> Teacher:
    return Teacher(*build(cfg, seed=seed), WEIGHT, TEMPERATURE)


def test_the_divergence_and_its_gradient_are_those_of_the_formulas():
    """T^2 sum p ln(p / q), and T (q - p), in NumPy float64."""
    draw = np.random.default_rng(0)
    student, teacher = (3 * draw.normal(size=(4, 7)) for _ in range(2))
    q, p = (oracles.softmax(logits / TEMPERATURE) for logits in (student, teacher))
    actual, gradient = jax.value_and_grad(lambda x: divergence(x, teacher, TEMPERATURE).sum())(student.astype("f4"))
    proves = "train.teacher", "NumPy float64"
    assert_close(actual, TEMPERATURE**2 * (p * np.log(p / q)).sum(), 1e-5, proves=proves)
    assert_close(gradient, TEMPERATURE * (q - p), 1e-5, proves=proves)


@pytest.mark.parametrize("top", [3, 7])
def test_the_divergence_from_the_top_tokens_is_that_of_the_formula(top):
    """T^2 sum p ln(p / q) over the top tokens, whose p sum to 1, and T (q - p); all tokens give the whole one."""
    draw = np.random.default_rng(1)
    student, teacher = (3 * draw.normal(size=(4, 7)) for _ in range(2))
    ids = np.argsort(-teacher)[:, :top]
    log_p = np.take_along_axis(np.log(oracles.softmax(teacher)), ids, axis=1)
    best = np.take_along_axis(teacher, ids, axis=1)
    q, p = oracles.softmax(student / TEMPERATURE), np.zeros_like(student)
    np.put_along_axis(p, ids, oracles.softmax(best / TEMPERATURE), axis=1)
    expected = TEMPERATURE**2 * (p * np.log(np.where(p, p, 1) / q)).sum()
    stored = TopLogits(ids.astype("i4"), log_p.astype("f4"))
    value, gradient = jax.value_and_grad(lambda x: divergence(x, stored, TEMPERATURE).sum())(student.astype("f4"))
    assert_close(value, expected, 1e-5)
    assert_close(gradient, TEMPERATURE * (q - p), 1e-5)
    if top == 7:
        assert_close(value, divergence(student, teacher, TEMPERATURE).sum(), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("chunk", [None, 4])
def test_the_loss_mixes_labels_and_teacher(chunk):
    """The forward passes of both models, and the losses, in NumPy float64."""
    (model, params), teacher, data = build(STUDENT), taught_by(LARGER), batch()
    logits, taught = (
        oracles.decoder_lm(oracles.f64(tree), cfg, data["tokens"], data["tokens"] != PAD)
        for tree, cfg in ((params, STUDENT), (teacher.params, LARGER))
    )
    counted = data["targets"] != IGNORED
    nll = -np.log(oracles.softmax(logits[counted]))[np.arange(counted.sum()), data["targets"][counted]]
    q, p = (oracles.softmax(values[counted] / TEMPERATURE) for values in (logits, taught))
    expected = TEMPERATURE**2 * (p * np.log(p / q)).sum()
    sums, _ = jax.jit(lambda params: batch_loss(model, params, data, chunk=chunk, teacher=teacher))(params)
    assert_close(sums.divergence, expected, 1e-5)
    assert_close(sums.nll, nll.sum(), 1e-5)
    assert_close(sums.loss, (1 - WEIGHT) * nll.sum() + WEIGHT * expected, 1e-5)


@pytest.mark.long
def test_a_model_learns_nothing_from_itself():
    (model, params), data = build(STUDENT), batch()
    teacher = Teacher(model, params, 1.0, TEMPERATURE)
    sums, gradients = jax.jit(
        lambda params: (
            batch_loss(model, params, data, teacher=teacher)[0],
            jax.grad(lambda params: batch_loss(model, params, data, teacher=teacher)[0].loss)(params),
        )
    )(params)
    assert float(sums.loss) == float(sums.divergence)
    assert abs(float(sums.divergence)) < 1e-8 * float(sums.nll)  # nothing but rounding in float32
    assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(gradients)) < 1e-5


@pytest.mark.slow
def test_steps_on_a_mesh_equal_those_on_one_device():
    """Also with micro-batches; the teacher is sharded by the rules of its own axes, and in no state."""
    actual = []
    for parallel, accumulate in ((ParallelConfig(data=1), 1), (ParallelConfig(data=1, fsdp=2), 2)):
        cfg = dataclasses.replace(settings(train={"teacher": "not/read", "accumulate": accumulate}), parallel=parallel)
        mesh, teacher = make_mesh(parallel), taught_by(LARGER)
        where = jax.tree.map(lambda leaf: leaf.sharding, registry.sharded_shapes(teacher.model, mesh))
        params = jax.device_put(teacher.params, where)
        model = registry.build(cfg.model)
        optimizer = optimizers.build(cfg, registry.shapes(model))
        start = state.create(model, optimizer, cfg, mesh)
        size = len(jax.tree.leaves(start))
        step = jitted(make_train_step(model, optimizer, cfg, teacher=teacher), start, mesh)
        start, metrics = step(start, placement.shard_batch(mesh, batch()), params)
        assert len(jax.tree.leaves(start)) == size
        actual.append((start.params, dict(metrics)))
    assert actual[0][1]["divergence"] > 0.1
    jax.tree.map(lambda a, b: assert_close(np.asarray(b), np.asarray(a), 1e-4), *actual)
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params)} == {True, False}


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"teacher_weight": 0.1}, "train.teacher_weight=0.1: is used only with train.teacher; leave it out"),
        ({"teacher": "x", "teacher_weight": 0.0}, "train.teacher_weight=0.0: must be above 0.0"),
        ({"teacher_step": 3}, "train.teacher_step=3: is used only with train.teacher; leave it out"),
    ],
)
def test_settings_that_do_not_fit(train, sentence):
    with pytest.raises(UserError, match=sentence):
        TrainConfig(**train)


def test_classifiers_have_no_teacher():
    with pytest.raises(UserError, match="train.teacher='x': teaches no models of the family 'classifier'"):
        Config.from_dict(
            {"model": {"family": "classifier"}, "data": {"source": "cldr_language"}, "train": {"teacher": "x"}}
        )
