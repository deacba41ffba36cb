"""Checkpoints of a named step: what `--step`, `tj.load(step=)` and `train.start_from_step` read."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tformer_jax as tj
from tests.runs.conftest import small_config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.runs import experiment, run_folder, training, weights
from tformer_jax.runs.start_from import check
from tformer_jax.runs.trained import load_trained

pytestmark = pytest.mark.usefixtures("compiled_by_the_first_step")


@pytest.fixture(scope="module")
def several(tmp_path_factory, corpus_folder) -> Path:
    """A run whose checkpoint of step N has N in all parameters and -N in their EMA; its final weights are 7."""
    folder = tmp_path_factory.mktemp("runs") / "several"
    built = experiment.build(small_config(steps=3, ema_decay=0.5), folder, data_root=corpus_folder)
    with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
        trainer = started.trainer
        for step in (1, 2, 3):
            params = jax.tree.map(lambda leaf, step=step: jnp.full_like(leaf, step), trainer.state.params)
            mean = jax.tree.map(lambda leaf, step=step: jnp.full_like(leaf, -step), trainer.state.ema)
            trainer.state = trainer.state.replace(step=jnp.int32(step), params=params, ema=mean)
            trainer.step = step
            started.save()
        started.checkpointer.wait()
        final = jax.tree.map(lambda leaf: jnp.full_like(leaf, 7), trainer.state.params)
        weights.save(folder, final, "average_last", [3, 2], 3)
    return folder


def values(params) -> set[float]:
    return {float(value) for leaf in jax.tree.leaves(params) for value in np.unique(leaf)}


@pytest.mark.long
def test_a_named_step_gives_its_own_parameters(several):
    assert values(load_trained(several).params) == {7}
    assert [values(tj.load(several, step=step).params) for step in (2, 3)] == [{2}, {3}]
    assert tj.load(several, step=2).step == 2
    assert run_folder.weights_of(several, 2) == {"kind": "checkpoint", "steps": [2]}


def test_a_named_step_gives_the_ema_that_the_run_evaluates(several, tmp_path):
    shutil.copytree(several, tmp_path / "run")
    cfg = json.loads((several / "config.json").read_text())
    cfg["train"]["weights"] = "ema"
    (tmp_path / "run" / "config.json").write_text(json.dumps(cfg))
    assert values(load_trained(tmp_path / "run", step=2).params) == {-2}
    assert run_folder.weights_of(tmp_path / "run", 2) == {"kind": "checkpoint", "steps": [2]}


def test_a_step_without_a_checkpoint(several, first, tmp_path):
    with pytest.raises(UserError, match=r"has no checkpoint of step 9, but of steps 2, 3$"):
        tj.load(several, step=9)
    shutil.copytree(first, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint of step 1, and no other$"):
        tj.load(tmp_path / "run", step=1)


def test_a_damaged_checkpoint_of_a_named_step(several, tmp_path):
    shutil.copytree(several, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "2" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="2 is damaged"):
        tj.load(tmp_path / "run", step=2)
    assert values(tj.load(tmp_path / "run", step=3).params) == {3}


def with_train(cfg: Config, **changes) -> Config:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))


@pytest.mark.long
def test_a_run_starts_from_the_checkpoint_of_a_step(several, corpus_folder, tmp_path):
    cfg = with_train(small_config(steps=1), start_from=str(several), start_from_step=2)
    built = experiment.build(cfg, tmp_path / "tuned", data_root=corpus_folder)
    with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
        assert values(started.trainer.state.params) == {2}
    record = json.loads((tmp_path / "tuned" / "start_from.json").read_text())
    assert record["weights"] == {"kind": "checkpoint", "steps": [2]}


def test_a_run_cannot_start_from_a_step_that_is_missing(several):
    trained = load_trained(several)
    train = dataclasses.replace(trained.cfg.train, start_from=str(several), start_from_step=1)
    with pytest.raises(UserError, match="has no checkpoint of step 1, but of steps 2, 3"):
        check(train, trained.cfg.model, trained.tokenizers, several)
    with pytest.raises(UserError, match=r"train.start_from_step=2: is used only with train.start_from; leave it out"):
        with_train(trained.cfg, start_from_step=2)
