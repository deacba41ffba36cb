"""Run folders that are not created, replaced, continued or loaded, each with one sentence."""

import shutil

import pytest

from tests.runs.conftest import small_config
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.runs import experiment, run_folder
from tformer_jax.runs.trained import load_trained


def test_overwrite_starts_from_the_beginning(corpus_folder, tmp_path):
    folder = tmp_path / "run"
    experiment.build(small_config(), folder, data_root=corpus_folder)
    (folder / "metrics.jsonl").write_text("old\n")
    experiment.build(small_config(steps=9), folder, data_root=corpus_folder, overwrite=True)
    assert config.load(folder / "config.json").train.steps == 9
    assert not (folder / "metrics.jsonl").exists()


def test_a_file_that_holds_another_kind_of_json_is_damaged(tmp_path):
    (tmp_path / "labels.json").write_text("3")
    with pytest.raises(UserError, match=r"labels.json is damaged \(a JSON int where a list is expected\)"):
        run_folder.load_labels(tmp_path)


def test_a_replaced_run_is_removed_only_after_the_new_one_is_in_place(corpus_folder, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    experiment.build(small_config(), folder, data_root=corpus_folder).close()
    remaining = shutil.rmtree

    def interrupted(path, **options):
        if path.name == ".run.old" and path.exists():
            raise KeyboardInterrupt
        return remaining(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment.build(small_config(steps=9), folder, data_root=corpus_folder, overwrite=True)
    assert config.load(folder / "config.json").train.steps == 9
    monkeypatch.undo()
    experiment.build(small_config(steps=8), folder, data_root=corpus_folder, overwrite=True).close()
    assert not (tmp_path / ".run.old").exists()


def test_a_run_folder_may_be_a_symbolic_link(corpus_folder, tmp_path):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large_disk")
    experiment.build(small_config(), tmp_path / "run", data_root=corpus_folder).close()
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "large_disk" / "config.json").exists()


def test_one_run_is_not_both_continued_and_replaced(corpus_folder, tmp_path):
    with pytest.raises(UserError, match="--resume continues a run and --overwrite replaces it: write one of them"):
        experiment.build(small_config(), tmp_path, data_root=corpus_folder, resume=True, overwrite=True)


def test_changed_data_or_metrics_cannot_resume(corpus_folder, tmp_path):
    data, folder, cfg = tmp_path / "data", tmp_path / "run", small_config()
    shutil.copytree(corpus_folder, data)
    experiment.build(cfg, folder, data_root=data).batches.close()
    lines = (data / "pairs.tsv").read_text().splitlines(keepends=True)
    (data / "pairs.tsv").write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match=r"the data of .*run changed \(the number of train examples is \d+ and was \d+"):
        experiment.build(cfg, folder, data_root=data, resume=True)
    (data / "pairs.tsv").write_text("".join([*lines[:9], "other\tOTHER\n", *lines[10:]]))
    with pytest.raises(UserError, match="the data of .*run changed .the checksum of the train examples is"):
        experiment.build(cfg, folder, data_root=data, resume=True)
    (data / "pairs.tsv").write_text("".join(lines))
    experiment.build(cfg, folder, data_root=data, resume=True).batches.close()
    for name, value in (("metric", "bleu"), ("z_loss", 1e-4)):
        changed = Config.from_dict({**config.to_dict(cfg), "train": {**config.to_dict(cfg.train), name: value}})
        with pytest.raises(UserError, match=f"is a run of another config .train.{name}: "):
            experiment.build(changed, folder, data_root=data, resume=True)


def test_a_folder_with_other_files_is_not_changed(corpus_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match="is not a run folder"):
            experiment.build(small_config(), tmp_path, data_root=corpus_folder, **options)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_prepared_data_with_other_tokenizers_cannot_resume(corpus_folder, tmp_path):
    cfg = small_config(steps=1)
    prepare(cfg, corpus_folder, tmp_path / "data")
    changes = {"source": "prepared", "train": str(tmp_path / "data")}
    prepared = Config.from_dict({**config.to_dict(cfg), "data": {**config.to_dict(cfg.data), **changes}})
    experiment.build(prepared, tmp_path / "run").batches.close()
    experiment.build(prepared, tmp_path / "run", resume=True).batches.close()
    prepare(cfg, corpus_folder, tmp_path / "data", tokenizers=Tokenizers(ByteTokenizer(), ByteTokenizer()))
    with pytest.raises(
        UserError, match="data/tokenizers are not the tokenizers that .*run/tokenizers was trained with"
    ):
        experiment.build(prepared, tmp_path / "run", resume=True)


def test_nothing_is_written_when_the_data_is_missing(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        experiment.build(small_config(), tmp_path / "run", data_root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_loading_folders_that_are_not_trained_runs(tmp_path, corpus_folder):
    with pytest.raises(UserError, match="does not exist; name the run folder"):
        load_trained(tmp_path / "nowhere")
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(UserError, match="result.json is a file; name the run folder"):
        load_trained(tmp_path / "result.json")
    with pytest.raises(UserError, match="is not a run folder"):
        load_trained(tmp_path)
    experiment.build(small_config(), tmp_path / "untrained", data_root=corpus_folder)
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_trained(tmp_path / "untrained")
    (tmp_path / "untrained" / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_trained(tmp_path / "untrained")


def test_a_run_that_cannot_be_completed_replaces_no_other(tmp_path):
    contents = small_config(), Tokenizers(ByteTokenizer(), ByteTokenizer()), None
    run_folder.create(tmp_path / "run", *contents)
    identifier = run_folder.run_id(tmp_path / "run")
    with pytest.raises(KeyError), run_folder.creating(tmp_path / "run", *contents) as folder:
        assert run_folder.run_id(folder) != identifier
        raise KeyError
    assert run_folder.run_id(tmp_path / "run") == identifier
    assert [*tmp_path.iterdir()] == [tmp_path / "run"]
