"""Runs with LoRA: their final weights, and a resume after a kill."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.runs.conftest import small_config
from tests.train.test_lora import RANK, flat
from tformer_jax import api
from tformer_jax.runs import experiment, training


@pytest.fixture(scope="module")
def finished(corpus_folder, tmp_path_factory):
    """The folder of a run without LoRA."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    training.run(experiment.build(small_config(steps=1), folder, data_root=corpus_folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("train", [{}, {"weights": "ema", "ema_decay": 0.9}, {"weights": "average_last", "average": 2}])
def test_a_run_from_another_run_is_saved_merged(corpus_folder, finished, tmp_path, train):
    """The final weights differ from those of the other run by a matrix of the rank, in the kernels alone."""
    cfg = small_config(steps=2, checkpoint_every=1, lora_rank=RANK, start_from=str(finished), **train)
    assert training.run(experiment.build(cfg, tmp_path / "tuned", data_root=corpus_folder))
    before, after = (flat(api.load(folder).params) for folder in (finished, tmp_path / "tuned"))
    for path, leaf in before.items():
        update = np.asarray(after[path], np.float64) - np.asarray(leaf, np.float64)
        if not path.endswith("kernel"):
            np.testing.assert_array_equal(after[path], leaf)
        else:
            rows = len(leaf) if "output" not in path else leaf.shape[0] * leaf.shape[1]
            sizes = np.linalg.svd(update.reshape(rows, -1), compute_uv=False)
            rank = RANK * (2 if "weights" in train and train["weights"] == "average_last" else 1)
            assert sizes[0] > 1e-3
            assert sizes[rank:].max(initial=0) < 1e-4 * sizes[0]


@pytest.mark.slow
def test_killed_and_resumed(corpus_folder, finished, tmp_path):
    """Equal bit for bit to an uninterrupted run, with a moving average of the factors."""
    program = (
        "import sys; from pathlib import Path; from tests.runs.conftest import small_config;"
        "from tformer_jax.runs import experiment, training;"
        f"cfg = small_config(lora_rank={RANK}, ema_decay=0.9, weights='ema', start_from=sys.argv[3]);"
        "training.run(experiment.build(cfg, Path(sys.argv[1]), data_root=Path(sys.argv[2]), resume='-r' in sys.argv))"
    )

    def start(folder, *flags):
        arguments = [sys.executable, "-c", program, str(folder), str(corpus_folder), str(finished), *flags]
        return subprocess.Popen(arguments, cwd=Path(__file__).resolve().parents[2], stdout=subprocess.DEVNULL)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    process = start(killed)
    while not (killed / "checkpoints" / "4").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() != 0
    assert start(killed, "-r").wait() == 0
    jax.tree.map(np.testing.assert_array_equal, api.load(killed).params, api.load(whole).params)
    assert (killed / "metrics.jsonl").read_text().count("\n") == (whole / "metrics.jsonl").read_text().count("\n")
