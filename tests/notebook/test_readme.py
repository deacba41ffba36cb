"""The examples of training in Python run as the README has them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_examples_of_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "tformer_jax" / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n### Training\n")[2].partition("\n## ")[0]
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, scope)
    assert {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()} == {
        "experiment",
        "lm",
        "classifier",
        "ids",
        "own",
    }
    assert scope["module"](scope["tokens"], scope["tokens"] != -1).shape == (*scope["tokens"].shape, 99)
