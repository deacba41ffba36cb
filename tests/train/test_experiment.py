"""What is checked when a run is built: other processes that use its folder, and the run that it starts from."""

import pytest

from tests.train.conftest import small_config
from tformer_jax.config import ConfigError
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
