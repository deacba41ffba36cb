"""The program that measures a GPU, in its small form."""

import json
import os
import subprocess
import sys

import pytest

from tests.commands import ROOT


@pytest.mark.slow
def test_compares_attention_on_a_cpu_and_writes_its_records(tmp_path):
    arguments = ["-m", "tests.programs.gpu", "--tiny", "--only", "attention", "--output", str(tmp_path)]
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert json.loads((tmp_path / "summary.json").read_text())["attention"]["exit"] == 0
    record = json.loads((tmp_path / "attention.json").read_text())
    assert {check["backend"] for check in record["checks"] if "difference" in check} >= {
        "xla",
        "blockwise",
        "reference",
    }
    assert not any(check.get("wrong") for check in record["checks"])
