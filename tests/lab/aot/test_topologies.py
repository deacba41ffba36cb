"""Properties of train steps that are compiled for 16 and 256 TPUs."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs.topologies import CASES
from tformer_jax import presets
from tformer_jax.runs.hardware import CHIPS

ROOT = Path(__file__).resolve().parents[3]


def shapes(case: dict[str, Any], *kinds: str) -> list[list[int]]:
    actual = [shape for each in case["collectives"] if each["kind"] in kinds for shape in each["shape"].split(" + ")]
    return [[int(size) for size in re.findall(r"\d+", shape.partition("[")[2])] for shape in actual]


def check(case: dict[str, Any]) -> None:
    """The program fits; no activations of all rows are sent; FSDP's gradients are scattered; keys move round a ring."""
    plan = CASES[case["case"]]
    model, rows, T = presets.build(plan.preset), case["rows"], plan.length
    assert case["memory"]["together"] < CHIPS[plan.topology.partition(":")[0]].memory
    for shape in shapes(case, "all-gather", "all-reduce", "all-to-all"):
        of_all_rows = model.dim in shape and (rows * T in shape or {rows, T} <= set(shape))
        assert not (of_all_rows and math.prod(shape) >= rows * T * model.dim), f"activations: {shape}"
    if plan.parallel == {"preset": "fsdp"}:
        assert shapes(case, "reduce-scatter")
        for shape in shapes(case, "all-reduce"):
            for size in {model.ffn_dim, model.vocab_size, model.max_length}:
                whole = size in shape and math.prod(shape) >= model.dim * size  # shards may be along another axis
                of_a_parameter = whole and (model.dim in shape or size != model.max_length)
                assert not of_a_parameter, f"a gradient that is not scattered: {shape}"
    if "sequence" in plan.parallel:
        assert shapes(case, "collective-permute")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_a_case(name, tmp_path):
    record = tmp_path / "topologies.json"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.programs.topologies", "--only", name, "--record", record]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (case,) = json.loads(record.read_text())["cases"]
    check(case)
