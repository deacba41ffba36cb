"""Run folders in a bucket: a stand-in for `gs://` stores objects in a local folder and refuses what buckets lack."""

import dataclasses
import importlib.machinery
import io
import json
import sys
import time
import types
from pathlib import Path
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from etils.epath import gpath

from tests.runs.conftest import small_config
from tests.runs.test_checkpoint import HOST, abstract, assert_is, made
from tests.runs.test_metrics import lines
from tests.runs.test_run import assert_same_run, events
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path, is_remote
from tformer_jax.cli import prepare_data, sweep, translate
from tformer_jax.cli.common import run_parser
from tformer_jax.config import Config, DataConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.data.tokenizers.training import tokenizer_path
from tformer_jax.lab.commands import explain
from tformer_jax.notebook import training as notebook_training
from tformer_jax.parallel import multihost
from tformer_jax.runs import experiment, metrics, run_folder, training, weights
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.runs.record import EventLog


class Bucket(gpath.PosixGPath):
    """A path that `gs://` names; its objects are files under `ROOT`."""

    ROOT: ClassVar[str]

    @property
    def _path_str(self) -> str:
        return super()._path_str.replace("gs://", f"{self.ROOT}/", 1)

    def open(self, mode: str = "r", **options):
        if "a" in mode:
            raise io.UnsupportedOperation("append")
        return super().open(mode, **options)

    def replace(self, target):
        raise io.UnsupportedOperation("replace")

    def resolve(self, strict: bool = False):
        raise io.UnsupportedOperation("etils would prefix gs:// with the working directory")


@pytest.fixture
def gcsfs(monkeypatch) -> None:
    """A package gcsfs that can be found."""
    package = types.ModuleType("gcsfs")
    package.__spec__ = importlib.machinery.ModuleSpec("gcsfs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", package)


@pytest.fixture
def run(gcsfs, monkeypatch, tmp_path):
    """The path of a run folder in the bucket."""
    monkeypatch.setattr(Bucket, "ROOT", str(tmp_path), raising=False)
    epath.register_path_cls("gs://")(Bucket)
    yield as_path("gs://bucket/run")
    epath.register_path_cls("gs://")(gpath.PosixGPath)


def create(run: Path) -> None:
    tokenizer = CharacterTokenizer("ab")
    run_folder.create(run, small_config(), Tokenizers(tokenizer, tokenizer), ["x", "y"])


def test_flags_name_local_folders_and_buckets(gcsfs, capsys):
    assert str(explain.parser().parse_args(["--run", "gs://bucket/a"]).run / "b") == "gs://bucket/a/b"
    parse = run_parser("x", "").parse_args
    assert str(parse(["--run", "gs://bucket/a/b"]).run / "c") == "gs://bucket/a/b/c"
    assert parse(["--run", "runs/a"]).run == as_path("runs/a") == as_path(Path("runs/a")) == Path("runs/a")
    assert is_remote(as_path("gs://bucket/a"))
    assert not is_remote(as_path("runs/a"))
    with pytest.raises(SystemExit):
        parse(["--run", "s3://bucket/a"])
    assert "s3://bucket/a is not supported: a run folder is a local folder or gs://" in capsys.readouterr().err


def test_without_gcsfs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gs://bucket/run needs gcsfs: pip install -e"):
        as_path("gs://bucket/run")


def test_a_folder_is_created_and_replaced(run, monkeypatch):
    assert not run_folder.holds_run(run)
    create(run)
    first = run_folder.run_id(run)
    assert run_folder.holds_run(run)
    assert run_folder.load_labels(run) == ("x", "y")
    assert Tokenizers.load(run / "tokenizers").source.encode("ab")
    run_folder.write_json(run / "result.json", {"steps": 1, "test": {}})
    assert run_folder.result_of(run, small_config()) == {"steps": 1, "test": {}}
    run_folder.check_resumable(run, small_config(steps=9), {})
    run_folder.adopt(run, small_config(steps=9))
    assert not (run / "result.json").exists()
    create(run)
    assert run_folder.run_id(run) != first

    def full(*_):
        raise OSError(403, "Forbidden")

    monkeypatch.setattr(Tokenizers, "save", full)
    with pytest.raises(UserError, match=r"/bucket/run cannot be written \(Forbidden\); choose another run folder"):
        create(run)
    assert not (run / "config.json").exists()


def test_metrics_are_written_once_a_minute_and_at_the_end(run, monkeypatch):
    create(run)
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    written = {}
    for step in (0, 2):  # the second start is resumed from step 2
        writer = metrics.JsonLines(run, step)
        opened = clock[0]
        for clock[0] in (opened + 1, opened + 60, opened + 61):
            step += 1
            writer.write(step, "train", {"loss": 1.0})
            written[step] = [line["step"] for line in lines(run)]
        writer.close()
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5]
    assert written == {1: [], 2: [1, 2], 3: [1, 2], 4: [1, 2, 3, 4], 5: [1, 2, 3, 4]}
    log = EventLog(run)
    log.write(0, "start")
    log.write(2, "stopped", "by a signal")
    assert events(run) == [("start", 0), ("stopped", 2)]


def test_checkpoints_and_weights(run):
    create(run)
    keeper = Checkpointer(run_folder.checkpoints(run), keep=2)
    for step in (1, 2, 3):
        keeper.save(step, made(step), HOST)
    keeper.wait()
    assert keeper.steps() == [3, 2]
    (run / "checkpoints" / "3" / "state" / "_METADATA").write_text("{}")
    actual, host = keeper.restore(abstract(), quarantine=True)
    assert_is(actual, 2)
    assert host == HOST
    assert (run / "damaged" / "3").is_dir()
    keeper.close()
    params = {"a": jnp.arange(6.0)}
    weights.save(run, params, "last", [2], 2)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    np.testing.assert_array_equal(weights.load(run, shapes, 2)["a"], params["a"])


def test_several_processes_leave_no_files(run, monkeypatch):
    monkeypatch.setattr(multihost, "BEAT_SECONDS", 0.001)
    with multihost.roll_call(run, 0, 2, seconds=60):
        multihost.ProcessGroup(0, 2).check_shared(run)
        time.sleep(0.1)
    assert not run.parent.exists()


@pytest.mark.slow
def test_a_run_in_a_bucket_equals_a_local_one(run, corpus_folder, tmp_path, monkeypatch, capsys):
    def train(cfg: Config, folder: Path, **options) -> None:
        built = experiment.build(cfg, folder, data_root=corpus_folder, **options)
        assert (built.lock is None) == is_remote(folder)
        training.run(built)

    train(small_config(), tmp_path / "local")
    train(small_config(steps=4), run)
    train(small_config(), run, resume=True)
    assert_same_run(run, tmp_path / "local")
    with pytest.raises(UserError, match="already holds a run"):
        train(small_config(), run)
    capsys.readouterr()
    outputs = []
    for folder in ("gs://bucket/run", str(tmp_path / "local")):
        translate.main(["--run", folder, "abc", "hg"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    train(small_config(start_from="gs://bucket/run", steps=1, eval_every=1), tmp_path / "tuned")
    assert json.loads((tmp_path / "tuned" / "start_from.json").read_text())["missing"] == []


def test_locations_from_python_and_configs_are_in_the_bucket(gcsfs, monkeypatch):
    """Regression test: `Path` made local folders of them."""
    build = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(notebook_training.experiment, "build", build)
    with pytest.raises(InterruptedError):
        notebook_training.train(small_config(), run="gs://bucket/run", overwrite=True)
    assert is_remote(folder := build.call_args.args[1]) and str(folder) == "gs://bucket/run"
    data = DataConfig(tokenizer="file", tokenizer_file="gs://bucket/run")
    assert str(tokenizer_path(data, Path("data"))) == "gs://bucket/run"
    assert tokenizer_path(dataclasses.replace(data, tokenizer_file="run"), Path("data")) == Path("data/run")


def test_flags_of_local_paths_refuse_urls(capsys):
    for command, flags in ((sweep, ["--config", "c", "--sweep", "seed=0"]), (prepare_data, ["--config", "c"])):
        with pytest.raises(SystemExit):
            command.main([*flags, "--output", "gs://bucket/runs"])
        assert "--output: gs://bucket/runs is a URL: name a local file or folder" in capsys.readouterr().err
