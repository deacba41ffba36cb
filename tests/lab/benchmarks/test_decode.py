"""`benchmark.py decode` without the other systems; tests/parity compares with them."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tformer_jax.base import checks
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.lab.benchmarks import decode, decode_systems, turns
from tformer_jax.lab.commands import benchmark
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD, PAD_TOKEN

SIZES = {"layers": 1, "dim": 16, "heads": 2, "ffn_dim": 16, "vocab": 64, "batch": 3, "source": 5, "length": 6}
SIZES |= {"beams": 2, "lines": 4, "rounds": 2}
FLAGS = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
WORK = decode.Workload("a batch", [[4, EOS]] * 20, 1)


def options(*more: str) -> Any:
    return benchmark.parser().parse_args(["decode", *without(more), *more])


def without(more: Sequence[str]) -> list[str]:
    """Returns `FLAGS` without those that `more` has."""
    return [part for pair in zip(FLAGS[::2], FLAGS[1::2], strict=True) if pair[0] not in more for part in pair]


@dataclasses.dataclass
class Fake:
    """A system whose calls take `seconds` of simulated time, are recorded in `calls`, and return `output`."""

    name: str
    seconds: float
    output: np.ndarray
    calls: list[tuple[str, float]]
    packages: tuple[str, ...] = ()

    def prepare(self, rows, beams):
        return lambda: self.calls.append((self.name, self.seconds))

    def tokens(self, output):
        return self.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--dim", "18"], "--dim 18: must be a multiple of 4, twice --heads"),
        (["--config.model.dim=8"], "unexpected argument '--config.model.dim=8'"),
        (["--record", "."], "--record .: cannot be written"),
    ],
)
def test_mistakes(flags, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        benchmark.main(["decode", *without(flags), *flags])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--batch", "0"], "argument --batch: 0 must be an integer from 1 to 4096"),
        (["--ffn-dim", "70000"], "argument --ffn-dim: 70000 must be an integer from 1 to 65536"),
        (["--beams", "1"], "argument --beams: 1 must be an integer from 2 to 16"),
    ],
)
def test_sizes_out_of_range(flags, sentence, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["decode", *without(flags), *flags])
    assert sentence in capsys.readouterr().err


def test_only_the_cpu_is_compared(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match="this benchmark runs on the CPU, but JAX uses the gpu: set JAX_PLATFORMS=cpu"):
        benchmark.main(["decode", *FLAGS])


@pytest.mark.slow
def test_missing_peers_are_named_and_the_record_has_ours(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(checks, "not_installed", lambda modules: list(modules[-1:]))
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    benchmark.main(["decode", *FLAGS, "--record", str(tmp_path / "decode.json")])
    printed = capsys.readouterr().out
    for name, needed in (("Hugging Face", "transformers"), ("CTranslate2", "ctranslate2")):
        assert f'skipping {name}: {needed} not installed: pip install -e ".[benchmark]"\n' in printed
    for title in ("a batch of 3, greedy: 18", "a batch of 3, beam 2: 18", "4 lines, greedy: 24", "4 lines, beam 2: 24"):
        assert f"{title} tokens" in printed
    actual = json.loads((tmp_path / "decode.json").read_text())
    assert actual["sizes"] == SIZES | {"seed": 0}
    assert actual["threads"] == actual["hardware"]["cores"]
    assert list(actual["versions"]) == ["tformer_jax", "its jitted loop"]
    assert [(case["beams"], case["tokens"]) for case in actual["cases"]] == [(1, 18), (2, 18), (1, 24), (2, 24)]
    for case in actual["cases"]:
        assert all(len(seconds) == SIZES["rounds"] for seconds in case["seconds"].values())
        speeds = {name: case["tokens"] / statistics.median(seconds) for name, seconds in case["seconds"].items()}
        assert case["tokens_per_second"] == pytest.approx(speeds)
        share = speeds["tformer_jax"] / speeds["its jitted loop"]
        assert case["times_as_fast"] == {"its jitted loop": pytest.approx(share)}
        assert case["equal_rows"] == {"its jitted loop": 1}


def test_speeds_and_ratios_of_alternating_systems(monkeypatch):
    output, calls = np.full((20, 6), 5), []
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: sum(seconds for _, seconds in calls))
    systems = {name: Fake(name, seconds, output, calls) for name, seconds in (("tformer_jax", 2), ("b", 4), ("c", 1))}
    case = decode.measure_workload(WORK, systems, rounds=4)
    a = "tformer_jax"
    rounds = (a, "b", "c"), ("b", "c", a), ("c", a, "b"), (a, "b", "c")
    twice = [name for order in rounds for name in order for _ in range(2)]
    assert [name for name, _ in calls] == [a, "b", "c", *twice]
    assert case["seconds"] == {a: [2] * 4, "b": [4] * 4, "c": [1] * 4}
    assert case["tokens_per_second"] == {a: 60, "b": 30, "c": 120}
    assert case["times_as_fast"] == {"b": 2, "c": 0.5}
    assert case["equal_rows"] == {"b": 1, "c": 1}
    assert case["distinct_tokens_per_row"] == 1


def test_at_most_one_row_of_twenty_may_differ():
    ours = np.random.default_rng(0).integers(4, 60, (20, 6))
    theirs = ours.copy()
    theirs[7, 3] += 1
    assert decode.equal_row_share(WORK, "b", ours, theirs) == 0.95
    theirs[8, 5] += 1
    with pytest.raises(RunError, match="a batch, greedy: the outputs of b and tformer_jax differ in 2 of 20 rows"):
        decode.equal_row_share(WORK, "b", ours, theirs)


def test_rows_that_end_early_do_not_count_as_equal():
    ours = np.full((20, 6), 5)
    ours[:, 5] = PAD
    with pytest.raises(RunError, match="in 20 of 20 rows"):
        decode.equal_row_share(WORK, "b", ours, ours)


def test_sources():
    batch, batch_beam, file, file_beam = decode.workloads(options("--lines", "300"))
    assert [workload.beams for workload in (batch, batch_beam, file, file_beam)] == [1, 2, 1, 2]
    assert [len(row) for row in batch.rows] == [SIZES["source"]] * SIZES["batch"]
    assert {len(row) for row in file.rows} == set(range(4, 2 * SIZES["source"] + 1))
    for row in (*batch.rows, *file.rows):
        assert row[-1] == EOS
        assert all(4 <= token < SIZES["vocab"] - 1 for token in row[:-1])
    assert decode.workloads(options())[0].rows == batch.rows
    assert decode.workloads(options("--seed", "1"))[0].rows != batch.rows
    assert len(decode.workloads(options("--lines", "0"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_outputs_are_full_and_varied(beams):
    chosen = options("--vocab", "500", "--dim", "64", "--ffn-dim", "128", "--length", "16", "--batch", "8")
    cfg, params = decode.random_model(chosen)
    ours = decode_systems.Ours(registry.build(cfg), params, 8, 16)
    rows = decode.workloads(chosen)[0].rows
    output = ours.tokens(ours.prepare(rows, beams)())
    assert output.shape == (8, 16)
    assert not np.isin(output, [PAD, PAD_TOKEN, BOS, EOS, 499]).any()
    assert np.mean([len(set(row)) for row in output.tolist()]) > 4
    assert len({tuple(row) for row in output.tolist()}) == 8
