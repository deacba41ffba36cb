"""Complete runs: their files, and that a run killed and resumed equals one that was never stopped."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.runs.conftest import small_config
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.runs import experiment, guards, initial_state, run_folder, training
from tformer_jax.runs.trained import load_trained
from tformer_jax.train.loop import Trainer
from tformer_jax.train.meter import STEPS_AHEAD

ROOT = Path(__file__).resolve().parents[2]


def run(cfg: Config, folder: Path, data: Path, **options) -> dict | None:
    return training.run(experiment.build(cfg, folder, data_root=data, **options))


def records(folder: Path) -> list[dict]:
    """Returns the records of metrics.jsonl without the values that depend on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    clock = ("tokens_per_second", "flops_per_second", "data_wait_percent", "seconds", "memory_bytes")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


COMPILED: list[int] = []
KEPT: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Trainers with the same settings share one step, so that a resumed run traces nothing again."""
    make, jitted, made = initial_state.make_train_step, initial_state.jitted, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            initial_state,
            "make_train_step",
            lambda *parts, **options: made.setdefault(parts[-1], make(*parts, **options)),
        )
        patch.setattr(initial_state, "jitted", lambda step, *place: made.setdefault(step, jitted(step, *place)))
        yield made


def act_after(step: int, action: Callable[[training.Training], None], patch: pytest.MonkeyPatch) -> None:
    """Adds an action after a step, after the others."""
    actions = training.Training.actions
    due = lambda done: done == step  # noqa: E731
    patch.setattr(training.Training, "actions", lambda self: [*actions(self), (due, lambda: action(self))])


def two_shapes(**train: int) -> Config:
    return small_config(bucket_lengths=(6, 12), **{"checkpoint_every": 4, **train})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus_folder) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    finish = training.Training.finish

    def counted(self):
        COMPILED.append(self.trainer.train_step._cache_size())
        KEPT.append(len(self.trainer.monitor._batches))
        return finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Training, "finish", counted)
        run(two_shapes(), folder, corpus_folder)
    return folder


@pytest.mark.long
def test_each_shape_is_compiled_once(uninterrupted):
    assert COMPILED == [2]


def test_batches_are_kept_only_for_the_steps_in_flight(uninterrupted):
    assert KEPT == [STEPS_AHEAD + 1]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert records(folder) == records(expected)
    params, expected_params = load_trained(folder).params, load_trained(expected).params
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


def test_a_run_folder_holds_everything(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names == {
        "checkpoints",
        "config.json",
        "corpus.json",
        "events.jsonl",
        "metrics.jsonl",
        "model.json",
        "data.json",
        "outputs",
        "provenance.json",
        "result.json",
        "tensorboard",
        "tokenizers",
        "weights",
        "weights.json",
    }
    saved = config.load(uninterrupted / "config.json")
    assert saved.model.vocab_size == saved.model.source_vocab_size == 4 + 16
    assert [path.name for path in sorted((uninterrupted / "checkpoints").iterdir())] == ["4", "8"]
    assert [r["step"] for r in records(uninterrupted) if r["group"] == "train"] == list(range(1, 9))
    assert [r["step"] for r in records(uninterrupted) if r["group"] == "validation"] == [4, 8]


def test_results_are_valid_json_without_a_finite_metric(tmp_path):
    run_folder.write_json(tmp_path / "it.json", {"a": [float("inf"), (1.5, float("nan"))], "b": "x"})
    assert json.loads((tmp_path / "it.json").read_text(), parse_constant=pytest.fail) == {
        "a": [None, [1.5, None]],
        "b": "x",
    }


def test_the_result_records_its_environment(uninterrupted):
    result = json.loads((uninterrupted / "result.json").read_text())
    assert result["steps"] == 8
    assert result["seed"] == 0
    metrics = {"loss", "perplexity", "token_accuracy", "bleu", "chrf", "exact_match", "unknown_outputs"}
    assert set(result["test"]) == metrics
    assert result["tokens"] > 8 * 24
    assert {"command", "git_revision", "hardware", "packages", "seconds", "parameters"} <= set(result)
    version = metadata.version("sacrebleu")
    assert result["packages"]["sacrebleu"] == version
    assert result["signatures"]["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert set(result["signatures"]) == {"bleu", "chrf", "references"}


def events(folder: Path) -> list[tuple[str, int]]:
    """Returns the kinds and steps of the events of a run."""
    actual = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [(event["kind"], event["step"]) for event in actual]


def test_a_run_keeps_the_outputs_of_its_last_evaluations(uninterrupted):
    actual = json.loads((uninterrupted / "outputs" / "test.json").read_text())
    outputs = actual["outputs"]
    exact = 100 * sum(each["output"] == each["reference"] for each in outputs) / len(outputs)
    result = json.loads((uninterrupted / "result.json").read_text())
    assert result["test"]["exact_match"] == exact
    assert all(each["reference"] == each["source"].upper() for each in outputs)
    assert (actual["step"], actual["signatures"]) == (8, result["signatures"])
    assert sum(json.loads((uninterrupted / "model.json").read_text())["parameters"].values()) == result["parameters"]
    assert events(uninterrupted) == [("start", 0), ("finished", 8)]


@pytest.mark.long
def test_stopped_by_ctrl_c_and_resumed(uninterrupted, corpus_folder, tmp_path, monkeypatch, capsys, traced_once):
    folder = tmp_path / "stopped"
    act_after(3, lambda _: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert run(two_shapes(), folder, corpus_folder) is None
    assert "Stopped at step 3; the same command with --resume continues from there." in capsys.readouterr().out
    monkeypatch.undo()
    traced_once.clear()
    assert run(two_shapes(), folder, corpus_folder, resume=True) is not None
    assert_same_run(folder, uninterrupted)
    assert events(folder) == [("start", 0), ("stopped", 3), ("resume", 3), ("finished", 8)]


@pytest.mark.slow
def test_stopped_and_resumed_with_no_steps_left(corpus_folder, tmp_path, monkeypatch):
    folder = tmp_path / "stopped"
    act_after(3, lambda _: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert run(two_shapes(), folder, corpus_folder) is None
    monkeypatch.undo()
    assert run(two_shapes(steps=3), folder, corpus_folder, resume=True) is not None
    of_step = [record["group"] for record in records(folder) if record["step"] == 3]
    assert of_step == ["train", "validation", "test"]


@pytest.mark.slow
def test_stopped_in_the_last_evaluation(corpus_folder, tmp_path, monkeypatch, capsys):
    """The test split is evaluated when the run is resumed."""
    folder = tmp_path / "stopped"
    act_after(3, lambda _: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert run(two_shapes(steps=3), folder, corpus_folder) is None
    assert "Stopped at step 3; the same command with --resume continues from there." in capsys.readouterr().out
    monkeypatch.undo()
    assert run(two_shapes(steps=3), folder, corpus_folder, resume=True) is not None
    of_step = [record["group"] for record in records(folder) if record["step"] == 3]
    assert of_step == ["train", "validation", "test"]
    assert events(folder) == [("start", 0), ("stopped", 3), ("resume", 3), ("finished", 3)]


@pytest.mark.slow
def test_stopped_between_two_records(corpus_folder, tmp_path, monkeypatch):
    """With accumulation, a moving average and records every three steps: metrics not yet averaged are saved, too."""
    cfg = small_config(steps=7, log_every=3, eval_every=7, checkpoint_every=4, accumulate=2, ema_decay=0.5)
    run(cfg, tmp_path / "whole", corpus_folder)

    def end(started: training.Training) -> None:
        started.checkpointer.wait()
        raise KeyboardInterrupt

    act_after(5, end, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(cfg, tmp_path / "stopped", corpus_folder)
    monkeypatch.undo()
    run(cfg, tmp_path / "stopped", corpus_folder, resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_a_trace_is_written(corpus_folder, tmp_path):
    built = experiment.build(small_config(steps=12, eval_every=12), tmp_path / "run", data_root=corpus_folder)
    training.run(built, profile=True)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_killed_and_resumed(uninterrupted, corpus_folder, tmp_path):
    folder = tmp_path / "killed"
    program = (
        "import sys; from pathlib import Path; from tests.runs.conftest import small_config;"
        "from tformer_jax.runs import experiment, training;"
        "cfg = small_config(bucket_lengths=(6, 12), checkpoint_every=4);"
        "training.run(experiment.build(cfg, Path(sys.argv[1]), data_root=Path(sys.argv[2])))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(corpus_folder)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while not (folder / "checkpoints" / "4").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    run(two_shapes(), folder, corpus_folder, resume=True)
    assert_same_run(folder, uninterrupted)


def test_resuming_a_finished_run_does_nothing(uninterrupted, corpus_folder, tmp_path, monkeypatch, capsys):
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(training, "Training", None)
    result = run(two_shapes(), folder, corpus_folder, resume=True)
    assert result == json.loads((folder / "result.json").read_text())
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert "finished at step 8; increase train.steps to continue" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b'{"steps":', b"[]", b"\xff\x00"])
def test_a_damaged_result_is_written_again(content, uninterrupted, corpus_folder, tmp_path):
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    (folder / "result.json").write_bytes(content)
    built = experiment.build(two_shapes(), folder, data_root=corpus_folder, resume=True)
    built.close()
    assert built.finished is None
    (folder / "corpus.json").write_bytes(content)
    with pytest.raises(UserError, match="corpus.json is damaged"):
        experiment.build(two_shapes(), folder, data_root=corpus_folder, resume=True)


@pytest.mark.long
def test_resuming_records_changed_settings(uninterrupted, corpus_folder, tmp_path):
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    changed = two_shapes(log_every=3)
    changed = dataclasses.replace(changed, decode=dataclasses.replace(changed.decode, max_new_tokens=3))
    before, result = config.load(folder / "config.json"), (folder / "result.json").read_text()
    built = experiment.build(changed, folder, data_root=corpus_folder, resume=True)
    built.close()
    assert config.load(folder / "config.json") == before, "nothing is restored yet"
    assert (folder / "result.json").read_text() == result
    run_folder.adopt(folder, built.cfg)
    saved = config.load(folder / "config.json")
    assert (saved.train.log_every, saved.decode.max_new_tokens) == (3, 3)
    assert saved == built.cfg
    assert not (folder / "result.json").exists(), "the result was of the settings before"
    run(changed, folder, corpus_folder, resume=True)
    assert [record["step"] for record in records(folder) if record["group"] == "test"] == [8]
    assert json.loads((folder / "result.json").read_text())["steps"] == 8


@pytest.mark.slow
def test_the_watchdog_does_not_watch_the_end_of_a_run(uninterrupted, corpus_folder, tmp_path, monkeypatch):
    """Slow storage delays the last checkpoint and the final weights for longer than `train.hang_seconds`."""
    folder, ended = Path(shutil.copytree(uninterrupted, tmp_path / "run")), []

    def slow(write):
        def delayed(*args):
            time.sleep(1.3)
            return write(*args)

        return delayed

    monkeypatch.setattr(guards.os, "_exit", ended.append)
    monkeypatch.setattr(training.weights, "save", slow(training.weights.save))
    monkeypatch.setattr(training.Checkpointer, "wait", slow(training.Checkpointer.wait))
    assert run(two_shapes(hang_seconds=1), folder, corpus_folder, resume=True)
    assert not ended


@pytest.mark.slow
def test_the_watchdog_does_not_watch_compilation(corpus_folder, tmp_path, monkeypatch):
    """Regression test: a run ended in each resume if the step of another batch shape compiled for too long."""
    ended, shapes, jitted = [], set(), initial_state.jitted

    def slow(step, *place):
        compiled = jitted(step, *place)

        def call(state, batch):
            if batch["source"].shape not in shapes:
                time.sleep(5)
            shapes.add(batch["source"].shape)
            return compiled(state, batch)

        call.lower, call._cache_size = compiled.lower, compiled._cache_size
        return call

    monkeypatch.setattr(guards.os, "_exit", ended.append)
    monkeypatch.setattr(initial_state, "jitted", slow)
    assert run(two_shapes(hang_seconds=3), tmp_path / "run", corpus_folder)
    assert len(shapes) == 2
    assert not ended


def set_params(trainer: Trainer, params) -> None:
    placed = jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), params, trainer.state.params)
    trainer.state = dataclasses.replace(trainer.state, params=placed)


@pytest.mark.long
def test_the_logged_learning_rate_is_the_one_applied(corpus_folder, tmp_path):
    """After a skipped step, too: an SGD step has the size of the learning rate times the gradient norm."""
    cfg = small_config(steps=20, eval_every=20, checkpoint_every=20)
    plain = {"optimizer": "sgd", "beta1": 0.0, "clip_norm": 0.0, "warmup_steps": 20}
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **plain))
    built = experiment.build(cfg, tmp_path / "run", data_root=corpus_folder)
    with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
        trainer, applied = started.trainer, {}
        for step in range(1, 6):
            before = jax.device_get(trainer.state.params)
            if step == 3:
                set_params(trainer, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), before))
            trainer.run(started.actions(), lambda step=step: trainer.step == step)
            if step == 3:
                set_params(trainer, before)
            moved = jax.tree.map(np.subtract, jax.device_get(trainer.state.params), before)
            applied[step] = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(moved)))
    for record in records(tmp_path / "run"):
        assert record["skipped_steps"] == (record["step"] == 3)
        if record["step"] != 3:
            rate = applied[record["step"]] / record["grad_norm"]
            assert record["learning_rate"] == pytest.approx(rate, rel=1e-3)
    rates = [record["learning_rate"] for record in records(tmp_path / "run")]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1.5e-3, 2e-3])


@pytest.mark.slow
def test_resuming_a_finished_run_with_more_steps_continues(uninterrupted, corpus_folder, tmp_path):
    folder = tmp_path / "longer"
    run(two_shapes(steps=4), folder, corpus_folder)
    run(two_shapes(steps=8), folder, corpus_folder, resume=True)
    jax.tree.map(np.testing.assert_array_equal, load_trained(folder).params, load_trained(uninterrupted).params)


def test_a_run_folder_is_overwritten_only_on_request(uninterrupted, corpus_folder):
    before = sorted(os.listdir(uninterrupted))
    with pytest.raises(UserError, match="already holds a run: add --resume to continue it, --overwrite to replace"):
        experiment.build(small_config(), uninterrupted, data_root=corpus_folder)
    assert sorted(os.listdir(uninterrupted)) == before


def test_a_run_cannot_replace_the_run_that_it_starts_from(corpus_folder, uninterrupted):
    before = sorted(os.listdir(uninterrupted))
    cfg = small_config(start_from=str(uninterrupted))
    with pytest.raises(UserError, match="train.start_from=.*: is the run folder, which this run would replace"):
        experiment.build(cfg, uninterrupted, data_root=corpus_folder, overwrite=True)
    assert sorted(os.listdir(uninterrupted)) == before


def test_another_config_cannot_resume(uninterrupted, corpus_folder):
    changed = Config.from_dict({**config.to_dict(two_shapes()), "seed": 5})
    sentence = r"is a run of another config \(seed: 0 -> 5\); restore these settings"
    with pytest.raises(UserError, match=sentence) as caught:
        experiment.build(changed, uninterrupted, data_root=corpus_folder, resume=True)
    guards.FolderLock(uninterrupted).release()  # is free, although the traceback holds the frame that acquired it
    assert caught.tb
