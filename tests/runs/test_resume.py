"""What may change when a run is resumed, and what is recorded of it."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from tests.runs.conftest import small_config
from tests.runs.test_run import act_after
from tformer_jax import config
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.config import Config, kinds
from tformer_jax.models import registry
from tformer_jax.runs import experiment, training
from tformer_jax.runs.record import SettingChanges
from tformer_jax.train import optimizers


def changed(cfg: Config, settings: dict) -> Config:
    values = config.to_dict(cfg)
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        (values[section] if section else values)[key] = value
    return Config.from_dict(values)


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in map(json.loads, (folder / "events.jsonl").open()) if event["kind"] == kind]


@pytest.mark.parametrize("optimizer", [name for name in kinds.OPTIMIZERS if name != "python"])
def test_the_state_of_an_optimizer_does_not_depend_on_what_a_resume_may_change(optimizer):
    base = small_config()
    base = dataclasses.replace(base, optim=dataclasses.replace(base.optim, optimizer=optimizer))
    base = changed(base, {"model.vocab_size": 9, "model.source_vocab_size": 9})
    shapes = registry.shapes(registry.build(base.model))

    def state(cfg: Config):
        return jax.eval_shape(optimizers.build(cfg, shapes).init, nn.unbox(shapes))

    variants = [
        {"optim.clip_norm": 0.0},
        {"optim.weight_decay": 0.1},
        {"optim.adaptive_clip": 0.1, "optim.clip_norm": 0.0},
        {"optim.learning_rate": 1e-4, "optim.warmup_steps": 9},
    ]
    if optimizer != "schedule_free_adamw":
        variants += [{"optim.schedule": "cosine"}, {"optim.learning_rate_factors": ("*bias=0.5",)}]
    expected = state(base)
    for settings in variants:
        actual = state(changed(base, settings))
        assert jax.tree.structure(actual) == jax.tree.structure(expected), settings
        assert jax.tree.leaves(actual) == jax.tree.leaves(expected), settings


@pytest.mark.slow
def test_a_diverged_run_trains_on_as_its_message_advises(corpus_folder, tmp_path, monkeypatch, capsys):
    cfg, folder = small_config(steps=6, checkpoint_every=2, max_skipped_steps=1), tmp_path / "run"

    def run(cfg: Config, **options):
        return training.run(experiment.build(cfg, folder, data_root=corpus_folder, **options))

    def diverge(started: training.Training) -> None:
        state = started.trainer.state
        started.trainer.state = state.replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))

    with monkeypatch.context() as patch, pytest.raises(RunError) as ended:
        act_after(3, diverge, patch)
        run(cfg)
    message = str(ended.value)
    assert "repeat the command with --resume" in message
    advised = dict(re.findall(r"--config\.([\w.]+)=([\d.e+-]+\d)", message))
    assert set(advised) == {"optim.learning_rate", "optim.warmup_steps", "optim.clip_norm"}
    settings = {name: int(text) if name.endswith("steps") else float(text) for name, text in advised.items()}
    result = run(changed(cfg, settings | {"data.workers": 0, "name": "other"}), resume=True)
    assert result["steps"] == 6
    assert {(change["from_step"], change["setting"].partition(":")[0]) for change in result["changed_settings"]} == {
        (2, name) for name in advised
    }
    (event,) = events(folder, "settings")
    assert event["step"] == 2
    assert "optim.learning_rate: 0.01 -> 0.001" in event["message"]
    assert "name: 'small' -> 'other'" in event["message"]
    assert "Changed settings from step 2 on:" in capsys.readouterr().out


@pytest.mark.slow
def test_another_matmul_precision_is_reported(corpus_folder, tmp_path, capsys):
    """Regression test: on a CPU it changes what a run computes, and nothing said so."""
    folder = tmp_path / "run"
    for steps, precision in ((2, None), (4, "bfloat16"), (6, "bfloat16")):
        with jax.default_matmul_precision(precision):
            cfg = small_config(steps=steps, checkpoint_every=2)
            training.run(experiment.build(cfg, folder, data_root=corpus_folder, resume=steps > 2))
    change = "JAX_DEFAULT_MATMUL_PRECISION: None -> 'bfloat16'"
    assert capsys.readouterr().out.count(f"; {change}") == 1
    result = json.loads((folder / "result.json").read_text())
    of_precision = [change for change in result["changed_settings"] if "PRECISION" in change["setting"]]
    assert of_precision == [{"from_step": 2, "setting": change}]
    assert result["matmul_precision"] == "bfloat16"


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 3},
        {"optim.optimizer": "lion"},
        {"optim.beta2": 0.9},
        {"model.dropout": 0.2},
        {"data.batch_tokens": 96},
        {"train.label_smoothing": 0.1},
        {"train.ema_decay": 0.9},
    ],
)
def test_what_may_not_change_is_refused_by_name(settings, first, corpus_folder):
    cfg = changed(small_config(steps=1), settings)
    (name,) = settings
    with pytest.raises(UserError, match=rf"another config \({name}: .*restore .* train.start_from="):
        experiment.build(cfg, first, data_root=corpus_folder, resume=True)


@pytest.mark.parametrize("dropout", [False, True])
def test_another_backend_affects_training_with_attention_dropout(dropout):
    """Each backend draws the dropped weights in its own way."""
    texts = ["model.attention_backend: 'auto' -> 'blockwise'", "train.log_every: 1 -> 2"]
    changes = SettingChanges(4, texts, [], attention_dropout=dropout).of_training(5)
    assert changes == [{"from_step": 4, "setting": texts[0]}] * dropout


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {
            "train.accumulate": 2,
            "train.log_norms": True,
            "name": "other",
            "model.attention_backend": "xla",
            "optim.weight_decay": 0.1,
        },
        pytest.param({"data.workers": 1}, marks=pytest.mark.slow),
    ],
)
def test_what_may_change(settings, corpus_folder, tmp_path, compiled_by_the_first_step):
    folder = tmp_path / "run"
    built = experiment.build(small_config(), folder, data_root=corpus_folder)
    with contextlib.closing(built), contextlib.closing(training.Training(built)) as started:
        started.save()
    resumed = experiment.build(changed(small_config(), settings), folder, data_root=corpus_folder, resume=True)
    with contextlib.closing(resumed), contextlib.closing(training.Training(resumed)) as started:
        assert {text.partition(":")[0] for text in started.changes.texts} == {*settings}
        assert started.changes.of_training(started.trainer.step) == []  # no step was trained yet
