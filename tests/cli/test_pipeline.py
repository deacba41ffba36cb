"""Pipelines: the steps of a file, and a chain of training and translation that is killed at any moment."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from tests.runs.conftest import write_pairs
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.cli import pipeline
from tformer_jax.runs.trained import load_trained

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
import dataclasses
from tests.runs.conftest import small_config
from tformer_jax.config import to_config_dict

def get_config(variant):
    cfg = dataclasses.replace(small_config(steps=6, checkpoint_every=2, eval_every=6), name=variant)
    names = ("train", "back") if variant == "tagged" else ("train",)
    languages = {"source_language": "a", "target_language": "b"}
    if variant == "reverse":
        languages = {"source_language": "b", "target_language": "a"}
    data = {"source": "parallel_lines", "train": tuple(f"{name}.{{lang}}" for name in names)}
    data |= {"validation": "dev.{lang}", **languages}
    if variant == "tagged":
        data |= {"weights": (1, 1), "symbols": ("<bt>",), "transforms": ({"kind": "entry_tags", "tags": ("", "<bt>")},)}
    return to_config_dict(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **data)))
"""
STEPS = """
train --config config.py:reverse  # from b to a
translate --run runs/reverse --strategy sample --seed 3 --max-new-tokens 8 --input {data}/mono.b --output {data}/back.a
copy {data}/mono.b {data}/back.b
prepare_data --config config.py:plain --output prepared
train --config config.py:tagged
"""


def test_the_steps_of_a_file(tmp_path):
    file = tmp_path / "x.steps"
    file.write_text("# first\n\ntrain --config x.py \\\n  --run 'a run'  # here\ncopy {data}/a {data}/b\n")
    assert pipeline.read_steps(file, Path("d")) == [
        ["train", "--config", "x.py", "--run", "a run"],
        ["copy", "d/a", "d/b"],
    ]
    known = pipeline.read_steps(file, Path("d"))
    file.write_text(file.read_text(), newline="\r\n")
    assert pipeline.read_steps(file, Path("d")) == known
    with pytest.raises(UserError, match="needs --data DIR, the folder that {data} stands for"):
        pipeline.read_steps(file, None)
    for text, sentence in (
        ("trian --config x", "'trian --config x' begins with no command of a step; did you mean 'train'"),
        ("copy a", "'copy a' must read copy FILE FILE"),
        (
            "translate --run x --input=y",
            "x --input=y' needs --output FILE, so that it can be continued",
        ),
        ("score --run x", "'score --run x' needs --input and --output FILE"),
        ("train 'x", '"train \'x": No closing quotation'),
        ("# none", "x.steps has no step: write commands such as train --config FILE"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=sentence):
            pipeline.main([str(file)])
    with pytest.raises(UserError, match="absent cannot be read: No such file"):
        pipeline.main([str(tmp_path / "absent")])
    file.write_text(f"copy {tmp_path}/absent {tmp_path}/b")
    with pytest.raises(RunError, match=f"{tmp_path}/b: {tmp_path}/absent: No such file or directory$"):
        pipeline.main([str(file)])
    assert len(pipeline.read_steps(ROOT / "configs" / "diversified.steps", Path("d"))) == 7


def test_steps_continue_what_they_have_begun():
    children = mock.Mock()
    for command in ("train", "prepare_data", "score"):
        pipeline.run_step([command, "--config", "x"], children, None)
        assert children.run.call_args.args[0][-4:] == [command, "--config", "x", "--resume"]
    pipeline.run_step(["sweep", "--config", "x"], children, None)
    assert children.run.call_args.args[0][-3:] == ["sweep", "--config", "x"]


@pytest.mark.slow
def test_a_step_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.steps").write_text("copy x.steps y\ntrain --config absent.py\ncopy x.steps z\n")
    with pytest.raises(
        RunError,
        match="step 2 of 3 ended with status 2: train --config absent.py; after its correction",
    ):
        pipeline.main(["x.steps"])
    assert Path("y").exists() and not Path("z").exists()


@pytest.fixture
def folders(tmp_path):
    """Two folders with the same corpus and steps."""
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        write_pairs(folder)
        sides = zip(*(line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()), strict=True)
        for language, texts in zip("ab", sides, strict=True):
            (folder / f"train.{language}").write_text("\n".join(texts[:80]) + "\n")
            (folder / f"dev.{language}").write_text("\n".join(texts[80:90]) + "\n")
            if language == "b":
                (folder / "mono.b").write_text("\n".join(texts[90:]) + "\n")
        (folder / "config.py").write_text(CONFIG)
        (folder / "x.steps").write_text(STEPS)
    return tmp_path / "whole", tmp_path / "killed"


def start(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "tformer_jax", "pipeline", "x.steps", "--data", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)


def kill(process: subprocess.Popen) -> None:
    """Kills a pipeline and the step that it runs, which is its child."""
    os.kill(process.pid, signal.SIGSTOP)  # so that it starts no other
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (*map(int, children), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def results(folder: Path) -> dict[str, str]:
    """Returns checksums of the outputs: translations, prepared data, and final weights."""
    files = {path.name: path.read_bytes() for path in (*folder.glob("back.?"), *folder.glob("prepared/*.*"))}
    for run in folder.glob("runs/*/result.json"):
        leaves = jax.tree.leaves(load_trained(run.parent).params)
        files[run.parent.name] = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the children of a process in /proc")
def test_a_killed_pipeline_writes_the_same_files(folders):
    whole, killed = folders
    began = time.monotonic()
    assert start(whole).wait() == 0
    seconds = time.monotonic() - began
    draw, kills = random.Random(0), 0
    while True:
        process = start(killed)
        try:
            assert process.wait(draw.uniform(0.05, 0.25) * seconds if kills < 4 else None) == 0
            break
        except subprocess.TimeoutExpired:
            kill(process)
            kills += 1
    assert kills >= 2
    expected = results(whole)
    assert {"back.a", "back.b", "train.lengths", "reverse", "tagged"} <= expected.keys()
    assert results(killed) == expected
    assert start(killed).wait() == 0  # nothing is left to do
    assert results(killed) == expected


@pytest.mark.slow
def test_a_signal_stops_the_step_and_the_pipeline(folders):
    process = start(folders[0])
    while not list(folders[0].glob("runs/reverse/checkpoints/*")) and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert not (folders[0] / "back.a").exists()
