"""Stored distributions of a run: with all tokens, losses and gradients are those of the run in memory."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.helpers import assert_close
from tests.runs.conftest import small_config
from tformer_jax.base.errors import UserError
from tformer_jax.cli import prepare_data
from tformer_jax.config import Config
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.models import registry
from tformer_jax.models.losses import batch_loss
from tformer_jax.runs import experiment, run_folder, stored_teacher, teacher, training
from tformer_jax.runs.trained import load_trained

pytestmark = pytest.mark.slow
PACKED = {"batching": "packed", "window": 12, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(first, corpus_folder, tmp_path_factory):
    """The prepared data of the run `first`."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(small_config(), corpus_folder, folder / "p", tokenizers=Tokenizers.load(first / "tokenizers"))
    return folder


def student(folder, taught_by, *, steps: int = 4, data=None, **train) -> Config:
    cfg = small_config(steps=steps, teacher=str(taught_by), teacher_temperature=2.0, **train)
    read = dataclasses.replace(cfg.data, source="prepared", train=(str(folder / "p"),), **(data or {}))
    model = dataclasses.replace(cfg.model, dim=8, ffn_dim=8, dropout=0.0)
    return dataclasses.replace(cfg, model=model, data=read)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("data", [{}, PACKED], ids=["buckets", "packed"])
def test_all_tokens_give_the_loss_and_gradients_of_the_run_in_memory(first, folder, tmp_path, data, chunk):
    facts = stored_teacher.store(student(folder, first, data=data), None, tmp_path / "top", 10**6, lambda *_: None)
    assert facts["mass"] == pytest.approx(1, abs=1e-6)
    results = []
    for taught_by in (first, tmp_path / "top"):
        cfg = student(folder, taught_by, data=data)
        built = experiment.build(cfg, tmp_path / "run", overwrite=True)
        loaded = teacher.load(cfg.train, built.mesh, built.group)
        loss = functools.partial(batch_loss, built.model, batch=next(built.batches), chunk=chunk, teacher=loaded)
        params = jax.tree.map(lambda leaf: leaf.unbox(), registry.init(built.model, jax.random.key(0)), is_leaf=_boxed)
        gradient = jax.jit(jax.grad(lambda params, loss=loss: loss(params)[0].loss))
        results.append((jax.jit(lambda params, loss=loss: loss(params)[0])(params), gradient(params)))
        built.close()
    assert results[0][0].divergence > 0.01
    jax.tree.map(lambda memory, stored: assert_close(stored, memory, 2e-5), *results)


def _boxed(leaf):
    return hasattr(leaf, "unbox")


def test_the_command_and_a_resumed_student(first, folder, tmp_path, capsys):
    file = tmp_path / "config.py"
    file.write_text(
        "from tests.runs.test_stored_teacher import student\n"
        "from tformer_jax.config import to_config_dict\n"
        "from pathlib import Path\n"
        f"def get_config(): return to_config_dict(student(Path({str(folder)!r}), 'absent'))\n"
    )
    arguments = ["--config", str(file), "--output", str(tmp_path / "top"), "--teacher", str(first), "--top", "5"]
    for _ in range(2):
        prepare_data.main(arguments)
        assert "labels; the 5 stored tokens of a label have a probability of 0." in capsys.readouterr().out
    with pytest.raises(UserError, match="another value of top, 5 instead of 4: write them again with --overwrite"):
        prepare_data.main([*arguments[:-1], "4"])
    prepare_data.main([*arguments[:-1], "4", "--overwrite"])
    (tmp_path / "pairs.tsv").write_text("ab\tcd\n" * 30)
    text = ["--config.data.source=tsv", f"--config.data.train={tmp_path / 'pairs.tsv'}"]
    for wrong, sentence in (
        ([*arguments, "--shards", "2"], "--tokenizers and --shards are for examples"),
        ([*arguments, *text], "data.source='tsv': must be 'prepared'"),
        ([*arguments[:4], "--teacher", str(tmp_path / "top")], "has stored distributions: name the run of the teacher"),
    ):
        with pytest.raises(UserError, match=sentence):
            prepare_data.main(wrong)
    with pytest.raises(UserError, match="--top needs --teacher RUN"):
        prepare_data.main([*arguments[:4], "--top", "5"])
    with pytest.raises(UserError, match="train.teacher_step=3: is of a run"):
        experiment.build(student(folder, tmp_path / "top", teacher_step=3), tmp_path / "run")
    for run, ends in (("whole", (4,)), ("resumed", (2, 4))):
        for steps in ends:
            cfg = student(folder, tmp_path / "top", steps=steps, checkpoint_every=2)
            training.run(experiment.build(cfg, tmp_path / run, resume=True))
    whole, resumed = (load_trained(tmp_path / run).params for run in ("whole", "resumed"))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    record = run_folder.read_result(tmp_path / "whole")["teacher"]
    assert (record["run"], record["top"], record["stored"]) == (str(first), 4, str(tmp_path / "top"))
    record = run_folder.read_json(tmp_path / "whole" / "teacher.json")
    run_folder.write_json(tmp_path / "whole" / "teacher.json", record | {"digest": "other"})
    with pytest.raises(UserError, match="its weights have changed since .*whole started"):
        experiment.build(student(folder, tmp_path / "top", steps=6), tmp_path / "whole", resume=True)
