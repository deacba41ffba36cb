"""The systems of `benchmark.py decode` give the same outputs."""

import importlib.util
import json

import numpy as np
import pytest

from tformer_jax.lab.benchmarks import decode, turns
from tformer_jax.lab.commands import benchmark
from tformer_jax.special_tokens import EOS

FLAGS = ["--layers=2", "--dim=32", "--heads=4", "--ffn-dim=48", "--vocab=90", "--batch=4", "--source=7", "--length=9"]
FLAGS += ["--beams=3", "--lines=11", "--rounds=1"]
PEERS = [
    "its jitted loop",
    "Hugging Face",
    pytest.param(
        "CTranslate2",
        marks=pytest.mark.skipif(not importlib.util.find_spec("ctranslate2"), reason="CTranslate2 is not installed"),
    ),
]


@pytest.fixture(scope="module")
def systems():
    options = benchmark.parser().parse_args(["decode", *FLAGS])
    return decode.installed_systems(*decode.random_model(options), options, threads=1)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", PEERS)
def test_every_row_is_equal(systems, name, beams):
    """Rows of all lengths, shuffled, in several batches of which the last is not full."""
    rng = np.random.default_rng(3)
    rows = [[*rng.integers(4, 89, size).tolist(), EOS] for size in (5, 1, 12, 3, 3, 9, 2, 11, 6, 1)]
    ours, theirs = (system.tokens(system.prepare(rows, beams)()) for system in (systems["tformer_jax"], systems[name]))
    assert ours.shape == (10, 9)
    assert len(np.unique(ours, axis=0)) == 10
    np.testing.assert_array_equal(theirs, ours)


def test_the_command_compares_what_is_installed(systems, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    benchmark.main(["decode", *FLAGS, "--record", str(tmp_path / "decode.json")])
    actual = json.loads((tmp_path / "decode.json").read_text())
    assert list(actual["versions"]) == list(systems)
    assert {"torch", "transformers"} == set(actual["versions"]["Hugging Face"])
    for case in actual["cases"]:
        assert list(case["seconds"]) == list(systems)
        assert min(case["equal_rows"].values()) >= 0.95
        assert all(speed > 0 for speed in case["tokens_per_second"].values())
    assert capsys.readouterr().out.count("x as fast") == 4 * (len(systems) - 1)
