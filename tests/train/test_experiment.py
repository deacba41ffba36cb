"""What is checked when a run is built: other processes that use its folder, and the run that it starts from."""

import shutil
from pathlib import Path

import pytest

from tests.train.conftest import small_config
from tformer_jax.config import Config, ConfigError
from tformer_jax.train import experiment, run_folder


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_process_creates_meanwhile_is_kept(corpus_folder, tmp_path, monkeypatch, resume):
    """The other process starts and ends while this one reads its corpus, before it takes the lock."""
    folder, load, ids = tmp_path / "run", experiment.load_corpus, []

    def load_after_another(*args):
        monkeypatch.setattr(experiment, "load_corpus", load)
        experiment.build(small_config(), folder, data_root=corpus_folder).close()
        ids.append(run_folder.run_id(folder))
        return load(*args)

    monkeypatch.setattr(experiment, "load_corpus", load_after_another)
    with pytest.raises(ConfigError, match="another process has created or removed .*run since this one started: start"):
        experiment.build(small_config(), folder, data_root=corpus_folder, resume=resume)
    assert [run_folder.run_id(folder)] == ids


@pytest.fixture
def started_from_a_lost_run(corpus_folder, tmp_path) -> tuple[Config, Path]:
    """A run without checkpoints, with `train.start_from` naming a folder that no longer exists, and its config."""
    first, folder = tmp_path / "first", tmp_path / "run"
    experiment.build(small_config(), first, data_root=corpus_folder).close()
    (first / "checkpoints").mkdir()
    cfg = small_config(start_from=str(first))
    experiment.build(cfg, folder, data_root=corpus_folder).close()
    shutil.rmtree(first)
    return cfg, folder


def test_a_resumed_run_without_a_checkpoint_requires_the_run_that_it_starts_from(
    corpus_folder, started_from_a_lost_run
):
    cfg, folder = started_from_a_lost_run
    (folder / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(ConfigError, match="train.start_from=.*first': is not the folder of a trained run"):
        experiment.build(cfg, folder, data_root=corpus_folder, resume=True)


@pytest.mark.parametrize("kept", ["checkpoints/2/state", "result.json"])
def test_a_resumed_run_reads_its_own_checkpoint_or_result(corpus_folder, started_from_a_lost_run, kept):
    cfg, folder = started_from_a_lost_run
    path = folder / kept
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    built = experiment.build(cfg, folder, data_root=corpus_folder, resume=True)
    built.close()
    assert (built.finished is not None) == (kept == "result.json")
