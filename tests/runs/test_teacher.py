"""Runs that learn from another run: their records, a resume, and teachers that do not fit."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from tests.runs.conftest import small_config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, MoEConfig, ParallelConfig
from tformer_jax.runs import experiment, run_folder, training
from tformer_jax.runs.trained import load_trained


def student(teacher, steps: int = 4, **changes) -> Config:
    cfg = small_config(steps=steps, checkpoint_every=2, teacher=str(teacher), teacher_temperature=2.0)
    model = dataclasses.replace(cfg.model, dim=8, ffn_dim=8)
    return dataclasses.replace(cfg, **{"model": model, **changes})


def build(cfg: Config, folder, corpus_folder, **options) -> experiment.Experiment:
    return experiment.build(cfg, folder, data_root=corpus_folder, **options)


@pytest.fixture(scope="module")
def taught(first, corpus_folder, tmp_path_factory):
    """The folder of a finished student."""
    folder = tmp_path_factory.mktemp("runs") / "student"
    training.run(build(student(first), folder, corpus_folder))
    return folder


@pytest.mark.slow
def test_the_record_names_the_teacher(first, taught):
    result, folder = run_folder.read_result(taught), run_folder.read_json(taught / "teacher.json")
    assert result["teacher"] == folder
    assert (folder["run"], folder["weights"]) == (str(first), {"kind": "last", "steps": [0]})
    records = [record for record in run_folder.read_records(taught / "metrics.jsonl") if "divergence" in record]
    assert len(records) == 4
    for record in records:
        assert record["loss"] == pytest.approx(0.5 * record["nll"] + 0.5 * record["divergence"], rel=1e-5)


@pytest.mark.slow
def test_a_resumed_student_equals_an_uninterrupted_one(first, taught, corpus_folder, tmp_path):
    training.run(build(student(first, steps=2), tmp_path / "run", corpus_folder))
    training.run(build(student(first), tmp_path / "run", corpus_folder, resume=True))
    jax.tree.map(np.testing.assert_array_equal, *(load_trained(run).params for run in (tmp_path / "run", taught)))


@pytest.mark.slow
def test_a_changed_teacher_is_refused(first, taught, corpus_folder, tmp_path):
    teacher = shutil.copytree(first, tmp_path / "teacher")
    run = shutil.copytree(taught, tmp_path / "run")
    record = run_folder.read_json(run / "teacher.json")
    run_folder.write_json(run / "teacher.json", record | {"digest": "other"})
    with pytest.raises(UserError, match="train.teacher='.*first': its weights have changed since .*run started"):
        build(student(first, steps=6), run, corpus_folder, resume=True)
    shutil.rmtree(teacher / "weights")
    with pytest.raises(UserError, match="teacher/weights is damaged"):
        build(student(teacher), tmp_path / "new", corpus_folder)


@pytest.mark.parametrize(
    ("section", "changes", "sentence"),
    [
        ("data", {"tokenizer": "words"}, "has another vocabulary: set data.tokenizer='file' and data.tokenizer_file="),
        ("model", {"vocab_size": 32}, r"has model.vocab_size=\d+, and this run 32: they must be equal"),
        ("data", {"bucket_lengths": (20,)}, "has model.max_length=16, and the rows have 20 tokens"),
        ("parallel", {"data": 1, "fsdp": 1, "tensor": 4}, "does not fit the mesh of this run .*num_heads"),
        ("train", {"teacher": "absent"}, "train.teacher='absent': is not the folder of a trained run"),
    ],
)
def test_teachers_that_do_not_fit(first, corpus_folder, tmp_path, section, changes, sentence):
    model = dataclasses.replace(student(first).model, num_heads=4, max_length=20)
    cfg = student(first, model=model)
    cfg = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **changes)})
    with pytest.raises(UserError, match=sentence):
        build(cfg, tmp_path / "new", corpus_folder)


@pytest.mark.slow
def test_a_teacher_needs_no_experts_and_no_mesh_of_its_own(first, corpus_folder, tmp_path):
    """Regression test: the mesh was compared with the teacher's `parallel.preset`, and had to shard its experts."""
    teacher = shutil.copytree(first, tmp_path / "teacher")
    of_teacher = run_folder.read_json(teacher / "config.json")
    run_folder.write_json(teacher / "config.json", of_teacher | {"parallel": {"preset": "zero1"}})
    cfg = student(teacher, steps=1)
    model = dataclasses.replace(cfg.model, ffn="moe", moe=MoEConfig(num_experts=2), dim=12)
    data = dataclasses.replace(cfg.data, batch_tokens=72, batch_multiple=6)
    cfg = dataclasses.replace(cfg, model=model, data=data, parallel=ParallelConfig(data=3, expert=2))
    assert training.run(build(cfg, tmp_path / "new", corpus_folder))["steps"] == 1
