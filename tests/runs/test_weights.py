"""The final weights of a run, and early stopping."""

import contextlib
import dataclasses
import json
import random
import resource
import shutil
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.helpers import assert_close, load_into
from tests.runs.conftest import small_config
from tests.runs.test_checkpoint import made
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import announcement, experiment, training, weights
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.runs.evaluations import Evaluations
from tformer_jax.runs.record import SettingChanges
from tformer_jax.runs.trained import load_trained
from tformer_jax.train import optimizers, state

pytestmark = pytest.mark.usefixtures("compiled_by_the_first_step")


def run(cfg, folder, data, **options):
    return training.run(experiment.build(cfg, folder, data_root=data, **options))


def checkpoint(folder, step: int) -> state.TrainState:
    trained = load_trained(folder)
    optimizer = optimizers.build(trained.cfg, registry.shapes(trained.model))
    keeper = Checkpointer(folder / "checkpoints")
    abstract = state.abstract(trained.model, optimizer, trained.cfg, make_mesh(trained.cfg.parallel))
    actual, _ = keeper.restore_step(step, abstract)
    keeper.close()
    return actual


def test_equal_weights_are_not_written_again(tmp_path):
    """A finished run is evaluated again after a change of its settings; files written again have other checksums."""

    def saved(value: float, step: int = 3) -> str:
        weights.save(tmp_path, {"a": jnp.float32([value, 2])}, "last", [step], step)
        assert weights.verify(tmp_path, None)
        return (tmp_path / "weights.json").read_text()

    first = saved(1)
    assert saved(1) == first
    assert saved(1, step=4) != first
    assert saved(2) != (second := saved(1))
    (tmp_path / "weights" / "_METADATA").write_text("damaged")
    assert saved(1) != second


def test_the_mean_by_hand():
    trees = [{"a": jnp.float32([1, 2]), "b": jnp.bfloat16(value)} for value in (1.0, 4.0)]
    actual = weights.mean(trees)
    np.testing.assert_array_equal(actual["a"], [1, 2])
    assert actual["b"] == 2.5
    assert actual["b"].dtype == jnp.bfloat16


def test_weights_of_bfloat16_are_loaded_as_float32(tmp_path):
    """As routers of runs from before they were float32."""
    weights.save(tmp_path, {"router": jnp.bfloat16([1.5, 2])}, "imported", [], 0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    actual = weights.load(tmp_path, {"router": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)}, None)
    assert actual["router"].dtype == jnp.float32
    np.testing.assert_array_equal(actual["router"], [1.5, 2])


@pytest.mark.slow
def test_the_last_checkpoints_are_averaged(corpus_folder, tmp_path):
    folder = tmp_path / "run"
    cfg = small_config(keep_checkpoints=3, weights="average_last", average=3, ema_decay=0.5)
    result = run(cfg, folder, corpus_folder)
    assert result["weights"] == {"kind": "average_last", "steps": [8, 6, 4]}
    parts = [checkpoint(folder, step).params for step in (4, 6, 8)]
    hand = jax.tree.map(lambda *leaves: np.mean(np.float64(leaves), axis=0), *parts)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), load_trained(folder).params, hand)
    # another choice needs no training: the run is resumed at its end
    ema = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, weights="ema"))
    assert run(ema, folder, corpus_folder, resume=True)["weights"] == {"kind": "ema", "steps": [8]}
    jax.tree.map(np.testing.assert_array_equal, load_trained(folder).params, checkpoint(folder, 8).ema)


def test_averaging_depends_only_on_the_schedule(tmp_path):
    """Checkpoints every 2 steps and at the end count; those of two interruptions and of the best evaluation do not."""
    cfg = small_config(steps=9, checkpoint_every=2, keep_checkpoints=3, weights="average_last", average=3)
    states = {step: made(step) for step in range(1, 10)}
    keeper = Checkpointer(tmp_path, keep=3, every=2, keep_best=1)
    for step in (2, 3, 4, 6, 7, 8, 9):
        keeper.save(step, states[step], {}, score=5.0 if step == 7 else None)
    params, steps = weights.final_params(cfg, states[9], keeper)
    keeper.close()
    assert steps == [9, 8, 6]
    hand = jax.tree.map(lambda *leaves: np.mean(np.float64(leaves), axis=0), *(states[s].params for s in steps))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-2), params, hand)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6", "7", "8", "9"]


@pytest.mark.parametrize(("kind", "used"), [("best", [4]), ("average_best", [4, 2]), ("average_last", [8, 4, 2])])
def test_damaged_checkpoints_are_left_out_of_the_final_weights(kind, used, tmp_path, caplog):
    """Regression test: each resume of such a run ended with an error. Step 6 is damaged, and the best one."""
    cfg = small_config(checkpoint_every=2, eval_every=2, keep_checkpoints=4, keep_best=3, weights=kind, average=3)
    states = {step: made(step) for step in (2, 4, 6, 8)}
    scores = {2: 1.0, 4: 2.0, 6: 3.0, 8: None}
    keeper = Checkpointer(tmp_path, keep=4, every=2, keep_best=3)
    for step, saved in states.items():
        keeper.save(step, saved, {}, score=scores[step])
    keeper.wait()
    for path in (path for path in (tmp_path / "6" / "state").rglob("*") if path.parent.name == "d"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    params, steps = weights.final_params(cfg, states[8], keeper)
    assert steps == used
    assert "6 is damaged, or not of this config's model" in caplog.text
    assert "the final weights leave it out" in caplog.text
    hand = jax.tree.map(lambda *leaves: np.mean(np.float64(leaves), axis=0), *(states[step].params for step in used))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-2), params, hand)
    for step in (2, 4, 8):
        shutil.rmtree(tmp_path / str(step) / "state")
    with pytest.raises(UserError, match="is damaged, or not of this config's model"):
        weights.final_params(cfg, states[8], keeper)
    keeper.close()


def bytes_read() -> int:
    """Returns the bytes that this process has read so far, by Linux's counter."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


@pytest.mark.parametrize(
    ("kind", "optimizer", "factor"), [("last", "adamw", 1), ("ema", "adamw", 1), ("last", "schedule_free_adamw", 2)]
)
def test_only_evaluated_parameters_are_read(tmp_path, kind, optimizer, factor):
    """Of parameters, their EMA and two moments, one is read; schedule-free averages are made from two."""
    cfg = small_config(weights=kind, ema_decay=0.5)
    schedule = {"schedule": "constant", "learning_rate": 0.01}
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, optimizer=optimizer, **schedule))
    draw = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(draw.normal(size=(500, 400)), jnp.float32)}
    boxed = {"kernel": nn.LogicallyPartitioned(params["kernel"], ("embed", "mlp"))}
    moments = optimizers.build(cfg, boxed).init(params)
    other = jax.tree.map(lambda leaf: leaf if leaf.ndim < 2 else jnp.asarray(draw.normal(size=leaf.shape)), moments)
    saved = state.TrainState(jnp.int32(3), jnp.int32(0), params, other, jax.tree.map(lambda leaf: 2 * leaf, params))
    with contextlib.closing(Checkpointer(tmp_path, keep=1)) as keeper:
        keeper.save(3, saved, {})
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), saved)
    with contextlib.closing(Checkpointer(tmp_path)) as keeper:
        before = bytes_read()
        actual = weights.restored(cfg, keeper, abstract)
        read = (bytes_read() - before) / params["kernel"].nbytes
    jax.tree.map(np.testing.assert_array_equal, actual, weights.to_evaluate(cfg, saved))
    assert factor * 0.8 < read < factor + 0.5


@pytest.mark.long
def test_a_run_with_only_its_weights(first, tmp_path):
    """A copy without checkpoints loads, and initializes another run."""
    shutil.copytree(first, tmp_path / "run")
    trained = load_trained(tmp_path / "run")
    expected = trained.params
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    jax.tree.map(np.testing.assert_array_equal, load_trained(tmp_path / "run").params, expected)
    _, report = load_into(expected, trained.model.cfg, tmp_path / "run")
    assert len(report.loaded) == len(jax.tree.leaves(expected))
    (tmp_path / "run" / "weights.json").unlink()
    with pytest.raises(UserError, match="holds no checkpoint yet; train it first"):
        load_trained(tmp_path / "run")


def test_corrupted_weights_are_always_detected(tmp_path):
    """Each of 60 flips of one byte, a truncated file, and a missing file."""
    params = {"a": jnp.arange(500.0), "b": jnp.full((3, 5), 2, jnp.bfloat16)}
    weights.save(tmp_path, params, "last", [3], 3)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path, abstract, 3), params)
    files = [path for path in (tmp_path / "weights").rglob("*") if path.is_file() and path.stat().st_size]
    draw = random.Random(0)
    for number in range(62):
        path = draw.choice(files)
        whole = path.read_bytes()
        if number < 60:
            place = draw.randrange(len(whole))
            path.write_bytes(whole[:place] + bytes([whole[place] ^ draw.randrange(1, 256)]) + whole[place + 1 :])
        elif number == 60:
            path.write_bytes(whole[:-1])
        else:
            path.unlink()
        with pytest.raises(UserError, match="weights is damaged"):
            weights.load(tmp_path, abstract, 3)
        path.write_bytes(whole)
    assert weights.load(tmp_path, abstract, 3) is not None


def test_intact_weights_of_another_model_are_not_called_damaged(tmp_path):
    """Regression test: the user was told to remove them."""
    weights.save(tmp_path, {"a": jnp.ones(3)}, "last", [3], 3)
    abstract = {"b": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(UserError, match="holds other parameters than this version's model.*provenance.json names"):
        weights.load(tmp_path, abstract, 3)
    assert weights.verify(tmp_path, 3)


@pytest.mark.parametrize(("fingerprint", "since"), [(7, 1), (8, 0)])
def test_early_stopping_starts_anew_if_settings_of_its_scores_change(fingerprint, since):
    best = {"score": 1.0, "evaluations_since": 1}
    assert training.best_so_far({"best": best, "fingerprint": 7}, fingerprint).get("evaluations_since", 0) == since


@pytest.mark.slow
def test_the_best_checkpoint_and_early_stopping(corpus_folder, tmp_path, capsys, monkeypatch):
    losses, evaluate = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}, Evaluations._evaluate

    def scripted(self, step, split, evaluators, params):
        return evaluate(self, step, split, evaluators, params) | ({"loss": losses[step]} if split != "test" else {})

    monkeypatch.setattr(Evaluations, "_evaluate", scripted)
    cfg = small_config(
        steps=20, log_every=100, eval_every=2, patience=2, keep_best=1, keep_checkpoints=1, weights="best"
    )
    result = run(cfg, tmp_path / "run", corpus_folder)
    assert result["steps"] == 8
    assert result["weights"] == {"kind": "best", "steps": [4]}
    assert "Stopped at step 8: loss has not improved in 2 evaluations" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "8"]
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if record["group"] == "train"] == [2, 4, 6, 8]
    best = checkpoint(tmp_path / "run", 4).params
    jax.tree.map(np.testing.assert_array_equal, load_trained(tmp_path / "run").params, best)
    assert run(cfg, tmp_path / "run", corpus_folder, resume=True)["steps"] == 8
    assert "was stopped early at step 8; increase train.patience to continue" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("train", "steps", "events", "evaluated"),
    [
        ({}, [8], ["finished"], ["test"]),
        ({"weights": "best", "keep_best": 1}, [4], ["finished"], ["validation", "test"]),
        (
            {"weights": "average_last", "average": 3, "keep_checkpoints": 3},
            [8, 6],
            ["fewer_averaged", "finished"],
            ["validation", "test"],
        ),
    ],
)
def test_final_weights_of_earlier_steps_are_validated_and_missing_ones_reported(
    tmp_path, monkeypatch, train, steps, events, evaluated
):
    run, done = mock.MagicMock(spec=training.Training, cfg=small_config(**train)), []
    for name in ("record", "evaluations", "checkpointer", "trainer", "experiment"):
        setattr(run, name, mock.MagicMock())
    run.experiment.folder, run.evaluations.best.exhausted, run.changes = tmp_path, False, SettingChanges(0, [], [])
    run.experiment.corpus.directions = None
    run.trainer.step, run.trainer.state.params = 8, {}
    run.evaluations.validate_final = lambda kind, params: (done.append("validation"), {"loss": 1.0})[1]
    run.evaluations.test = lambda step, params: done.append("test")
    run._facts.return_value = {"seconds": 1.0}
    monkeypatch.setattr(announcement, "attention_backends", lambda _: {})
    monkeypatch.setattr(weights, "final_params", lambda *_: ({}, steps))
    monkeypatch.setattr(weights, "save", lambda *_: None)
    result = training.Training.finish(run)
    assert done == evaluated
    assert result.get("validation") == ({"loss": 1.0} if "validation" in evaluated else None)
    announced = [call.args for call in run.record.announce_event.call_args_list]
    written = [kind for _, kind, _ in announced] + [call.args[1] for call in run.record.events.write.call_args_list]
    assert written == events
    said = [text for _, _, text in announced]
    assert any("averages 2 checkpoints instead of train.average=3" in text for text in said) == (
        "fewer_averaged" in events
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "ema"}, "train.weights='ema': needs train.ema_decay"),
        ({"weights": "best"}, "train.keep_best=0: must be at least 1 for train.weights='best'"),
        ({"weights": "average_best", "keep_best": 3}, "must be at least 5"),
        ({"weights": "average_last"}, "train.keep_checkpoints=2: must be at least train.average=5"),
        ({"noise_scale": True}, "set train.accumulate to 2 or more"),
        ({"metric": "accuracy"}, "train.metric='accuracy': must be one of"),
        ({"accumulate": 3}, "data.batch_multiple=2: must be a multiple of train.accumulate=3"),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(UserError, match=message):
        small_config(**changes)


@pytest.mark.parametrize(("kind", "flag"), [("last", " with --resume"), ("imported", "")])
def test_weights_that_do_not_fit_on_the_disk(tmp_path, kind, flag):
    """Files of more than 4 KiB cannot be written."""
    params = {"a": np.random.default_rng(0).standard_normal(100_000, np.float32)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        problem = r"weights could not be written to .*weights \(File too large\): "
        with pytest.raises(RunError, match=f"{problem}.* repeat the command{flag}$"):
            weights.save(tmp_path, params, kind, [3], 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    weights.save(tmp_path, params, kind, [3], 3)
    assert weights.verify(tmp_path, 3)
