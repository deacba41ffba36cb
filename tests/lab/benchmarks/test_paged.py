"""`benchmark.py paged` on a small model."""

import json
import statistics

import numpy as np
import pytest

from tformer_jax.base.errors import RunError, UserError
from tformer_jax.lab.benchmarks import paged, turns
from tformer_jax.lab.commands import benchmark

SIZES = {"rows": 32, "length": 512, "layers": 1, "dim": 64, "steps": 2, "rounds": 3}


def flags(**sizes: int) -> list[str]:
    return ["paged", *(part for name, value in (SIZES | sizes).items() for part in (f"--{name}", str(value)))]


@pytest.mark.slow
def test_the_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    benchmark.main([*flags(), "--record", str(tmp_path / "paged.json")])
    actual = json.loads((tmp_path / "paged.json").read_text())
    assert actual["sizes"] == SIZES
    dense = 2 * 32 * 512 * 64 * 4
    assert actual["bytes"] == {"paged": dense // 4 + 2 * 16 * 64 * 4, "dense": dense}  # and the reserved page
    assert (min(actual["row_lengths"]), max(actual["row_lengths"])) == (3, 510)
    assert {name: len(times) for name, times in actual["seconds_per_step"].items()} == {"paged": 3, "dense": 3}
    medians = [statistics.median(actual["seconds_per_step"][name]) for name in ("dense", "paged")]
    assert actual["times_as_fast"] == pytest.approx(medians[0] / medians[1])
    assert actual["largest_relative_difference"] < 1e-5
    assert " ms per step, 8 MiB of keys and values\n" in capsys.readouterr().out


@pytest.mark.long
def test_other_logits_are_not_compared(monkeypatch):
    monkeypatch.setattr(paged, "decode_steps", lambda model, params, cache, steps: lambda: np.ones(2) * cache.nbytes)
    monkeypatch.setattr(paged, "fill_cache", lambda cache, lengths: cache.layers[0].self_attention.k)
    with pytest.raises(RunError, match=r"the logits over a paged and a dense cache differ by 7\.\de-01 of the largest"):
        benchmark.main(flags())


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"dim": 65}, "--dim 65: must be a multiple of 64"),
        ({"steps": 512}, "--steps 512: must be less than --length 512"),
        ({"length": 32}, r"the rows need 39 pages of 16 tokens, but 1/4 of the dense cache has 16: increase --rows or"),
    ],
)
def test_mistakes(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        benchmark.main(flags(**sizes))
