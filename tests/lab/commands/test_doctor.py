"""The report of the doctor, compared with real placements and errors."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.helpers import rest_slow
from tests.parallel.test_presets import PRESETS, config, set_up
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, TrainConfig
from tformer_jax.lab.commands import machine_checks, placement
from tformer_jax.lab.commands.doctor import main
from tformer_jax.lab.commands.doctor_report import checkpoints_on_disk

ROOT = Path(__file__).resolve().parents[3]
CLDR = ["--config", str(ROOT / "configs" / "translate_cldr.py")]
MULTI30K = ["--config", str(ROOT / "configs" / "translate_multi30k.py")]
FSDP = ["--config.parallel.fsdp=8"]
WIDE = "--config.model.ffn_dim=102400"
"""Slightly more than 4 layers x 2 x 128 x 102,400 parameters, in four float32 arrays."""


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch, tmp_path):
    """An environment without the flags of tests, a GPU or data, and with an empty folder for runs."""
    assert jax.device_count() == 8  # the flags have been read
    for name in ("XLA_FLAGS", "TFORMER_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def held(tree) -> int:
    """Returns the bytes of a tree that are on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


def test_an_assumed_number_of_classes_and_what_prepared_data_do_not_read(tmp_path, capsys):
    (tmp_path / "here.py").write_text(
        "from tformer_jax.config import *\n"
        "def get_config():\n"
        "    data = DataConfig(source='prepared', train='p', tokenizer='file', tokenizer_file='lost.json')\n"
        "    model = ModelConfig(family='classifier', dim=8, encoder_layers=1, vocab_size=9)\n"
        "    return to_config_dict(Config(model=model, data=data))\n"
    )
    with pytest.raises(SystemExit):
        main(["--config", str(tmp_path / "here.py")])
    shown = capsys.readouterr().out
    assert "hint: 2 classes are assumed" in shown
    assert "p is not the output of scripts/prepare_data.py" in shown
    assert "lost.json" not in shown


@pytest.mark.long
@pytest.mark.parametrize("preset", rest_slow([PRESETS[4], *PRESETS[:4]], 1))
def test_reported_bytes_equal_those_of_the_state(preset):
    cfg = config("decoder_lm", preset=preset)
    mesh, state, _ = set_up(cfg)
    actual = placement.estimate_placement(cfg, mesh.shape)
    assert actual.parameters == held(state.params)
    assert actual.optimizer == held(state.opt_state)
    assert actual.mean == held(state.ema)
    assert sum(group.device_bytes for group in actual.groups) == actual.parameters
    assert actual.checkpoint == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_all_columns_fit_80_characters(capsys, monkeypatch):
    """Regression test: the last one was cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    settings = [*FSDP, "--config.data.batch_multiple=16", "--config.parallel.data=2"]
    main([*CLDR, "--devices", "16", "--memory", "80", *settings])
    out = capsys.readouterr().out
    assert "per device" in out and "62.50 KiB" in out


def test_names_of_parameters_are_whole_in_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    main([*CLDR, "--devices", "8", "--config.data.batch_multiple=8", *FSDP])
    assert "│ encoder/layers_*/self_attention_residual/norm/scale " in capsys.readouterr().out


def test_no_problems_are_found(capsys, monkeypatch):
    main([*CLDR, "--devices", "16", "--config.data.batch_multiple=16", "--config.parallel.data=2", *FSDP])
    out = capsys.readouterr().out
    assert out.endswith("No problems found.\n")
    assert "mesh of 16 of 16 devices" in out
    assert "hint: model.dtype='float32' leaves much of a GPU or TPU unused" in out
    row = next(line for line in out.splitlines() if "target_embedding/embedding" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    # 1000 x 128 float32, its width split in 8
    assert cells[1:] == ["1", "1000 x 128", "vocab, embed", "-, fsdp", "62.50 KiB"]
    assert jax.__version__ in out and f"{jax.device_count()} x cpu (cpu)" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*CLDR, "--devices", "4", *FSDP], "parallel.fsdp=8 needs 8 devices, but there are 4; use sizes whose product"),
        (
            [*CLDR, "--devices", "8", "--config.parallel.tensor=8", "--config.parallel.data=1"],
            "model.num_heads=4: must",
        ),
        ([*CLDR, "--devices", "16", "--config.parallel.expert=2"], "parallel.expert=2: the model has no experts"),
        ([*CLDR, "--devices", "16"], "data.batch_multiple=8: must be a multiple of the 16 shards"),
        ([*MULTI30K, "--devices", "1"], "this config reads multi30k/train.en.gz (it comes from task 1"),
        (  # 4 layers x 3 matrices of 128 x 102,400 x 16 bytes are 2.34 GiB
            [*CLDR, "--config.optim.optimizer=adamw", "--devices", "1", "--memory", "1", WIDE],
            "state and gradients take about 2.35 GiB per device, which has 1.00 GiB",
        ),
        (  # 20,000 rows x 48 tokens x (4 layers x 128 + 1000 logits) x 4 bytes
            [*CLDR, "--devices", "1", "--memory", "1", "--config.data.batch_tokens=960000"],
            "and activations at least 5.41 GiB (estimated) per device, which has 1.00 GiB: try train.accumulate",
        ),
        ([*CLDR, "--devices", "1", "--config.optim.learning_rate_factors=('nothing*=2',)"], "'nothing*=2'"),
        ([*CLDR, "--devices", "1", "--config.train.start_from=missing"], "is not the folder of a trained run"),
    ],
)
def test_problems_are_reported(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert any(line.startswith("problem: ") and sentence in line for line in out.splitlines()), out
    assert "No problems found" not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "none.py"], "config file none.py does not exist"),
        (["--config", ""], "config file . is a folder; name a file in it"),
        (["--devices", "8"], "--devices applies to a config: add --config FILE"),
        (["--memory", "16"], "--memory applies to a config: add --config FILE"),
        (["--config.model.dim=3"], "--config.model.dim=3 applies to a config"),
        ([*CLDR, "--config.model.dimm=3"], "did you mean 'model.dim'"),
    ],
)
def test_mistakes_on_the_command_line(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        main(arguments)


@pytest.mark.slow
def test_the_script_survives_flags_that_end_jax(tmp_path):
    (tmp_path / "file").write_text("")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_tpu_nonsense=1 --xla_gpu_enable_fast_min_max=true --xla_dump_to=",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "--run", str(tmp_path / "file" / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("problem", "hint"))]
    assert [line.partition(", which")[0] for line in said[:2]] == [
        "problem: XLA_FLAGS has --xla_tpu_nonsense=1",
        "problem: XLA_FLAGS has --xla_gpu_enable_fast_min_max",
    ]
    assert said[0].endswith("remove it; flags of TPUs belong in LIBTPU_INIT_ARGS")
    assert said[2] == f"problem: {tmp_path / 'file' / 'run'} cannot be written (Not a directory): choose another --run"
    assert len(said) == 3


def test_other_runs_are_no_problem_without_a_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "translate").mkdir(parents=True)
    main([])
    assert capsys.readouterr().out.endswith("No problems found.\n")


@pytest.mark.long
def test_flags_that_are_known_pass(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert list(machine_checks.check_unknown_flags()) == []
    assert list(machine_checks.check_harmful_flags()) == []
    (hint,) = machine_checks.check_slow_flags()
    assert "--xla_gpu_autotune_level=0, which selects kernels without measuring them" in hint


def nvidia_smi(folder: Path, output: str, status: int = 0) -> None:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(("driver", "extra"), [("570.133.20", "cuda12"), ("580.65.06", "cuda13")])
def test_a_gpu_that_jax_does_not_use(driver, extra, tmp_path, monkeypatch):
    nvidia_smi(tmp_path / "bin", f"NVIDIA H100 80GB HBM3, 81559 MiB, {driver}")
    actual = machine_checks.find_gpus()
    assert actual == [machine_checks.Gpu("NVIDIA H100 80GB HBM3", "81559 MiB", driver)]
    assert list(machine_checks.check_accelerators(actual, "gpu")) == []
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (sentence,) = machine_checks.check_accelerators(actual, "cpu")
    assert sentence.endswith("JAX_PLATFORMS=cpu hides it: unset JAX_PLATFORMS")
    monkeypatch.delenv("JAX_PLATFORMS")
    (sentence,) = machine_checks.check_accelerators(actual, "cpu")
    assert sentence == f'this machine has 1 x NVIDIA H100 80GB HBM3, but JAX uses the CPU: pip install -e ".[{extra}]"'


def test_a_driver_that_fails(tmp_path):
    assert machine_checks.find_gpus() == []
    nvidia_smi(tmp_path / "bin", "Failed to initialize NVML: Driver/library version mismatch", status=18)
    with pytest.raises(UserError, match="nvidia-smi fails .Failed to initialize NVML.*: reinstall its driver"):
        machine_checks.find_gpus()


def test_unsupported_package_versions(monkeypatch):
    assert list(machine_checks.check_packages()) == []
    real = machine_checks.version
    changed = {"jax": "0.99.0", "optax": None, "jax-cuda13-plugin": "0.9.1"}
    monkeypatch.setattr(machine_checks, "version", lambda name: changed[name] if name in changed else real(name))
    sentences = list(machine_checks.check_packages())
    assert sentences[0].startswith('jax 0.99.0 is not supported; required: "jax<')
    assert sentences[1] == "the package optax is missing: pip install -e ."
    assert sentences[2].startswith("jax-cuda13-plugin 0.9.1 does not match jaxlib")
    assert len(sentences) == 3


def test_disk_space_for_checkpoints(tmp_path, monkeypatch):
    run, gib = tmp_path / "runs" / "one", 2**30
    usage = type("Usage", (), {"free": 5 * gib, "total": 9 * gib})
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage)
    assert list(machine_checks.check_folder(run, checkpoint=gib, count=4)) == []
    (sentence,) = machine_checks.check_folder(run, checkpoint=gib, count=5)
    assert "has 5.00 GiB free, but a run needs 6.00 GiB (5 checkpoints take 5.00 GiB): free some space" in sentence
    assert not run.parent.exists()


def test_permanent_checkpoints_take_disk_space():
    assert checkpoints_on_disk(TrainConfig(steps=1000, keep_checkpoints=2, keep_best=3)) == 2 + 3 + 2
    assert (
        checkpoints_on_disk(TrainConfig(steps=1000, keep_checkpoints=2, keep_best=3, permanent_every=300))
        == 2 + 3 + 3 + 2
    )


def test_folders_that_are_not_runs(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (sentence,) = machine_checks.check_folder(tmp_path, 0, 0)
    assert "is not a run folder" in sentence
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert list(machine_checks.check_folder(tmp_path, 0, 0)) == []


def test_data_files_are_located_but_not_read(tmp_path):
    data = DataConfig(source="parallel_lines", train="a.{lang}", validation="b.{lang}", test="b.{lang}")
    cfg = Config(data=data)
    for name in ("a.en", "a.de", "b.en"):
        (tmp_path / name).write_bytes(b"\xff")
    (sentence,) = machine_checks.check_data(cfg, tmp_path)
    assert sentence.startswith(f"{tmp_path / 'b.de'} does not exist")
    (tmp_path / "b.de").write_bytes(b"\xff")
    one_side = {"source_tokenizer": "file", "tokenizer_file": "tokenizer.json", "shared_vocab": False}
    (sentence,) = machine_checks.check_data(
        dataclasses.replace(cfg, data=dataclasses.replace(data, **one_side)), tmp_path
    )
    assert sentence.startswith(f"{tmp_path / 'tokenizer.json'} does not exist")
    assert list(machine_checks.check_data(cfg, tmp_path)) == []
