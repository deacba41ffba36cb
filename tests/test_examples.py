"""The examples in Python run from the first line to the last, with small models."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import build
from tformer_jax import presets
from tformer_jax.interop import hf

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "configs" / "examples").glob("*.py"))
SMALL = ("train.steps=2", "model.dim=16", "model.num_heads=4", "model.ffn_dim=16", "eval.examples=2", "eval.samples=1")
SMALL += ("data.heldout_examples=40", "decode.max_new_tokens=4")
SHORT = [f"--config.{setting}" for setting in SMALL]
OUTPUTS = {
    "translator": ("in 2 weeks -> ", "beam search: ", "in 3 weeks -> in 3 Wochen: ln p = -"),
    "own_attention": ("multi_head: loss ", "weighted_heads: loss ", "/head_weights"),
    "fine_tune": ("accuracy ", ": mardi 3 mars 2026"),
    "look_inside": (" reads '", "residual stream", "  layer 2:"),
    "many_languages": ("en-de Tuesday, March 3, 2026 -> ", "fr-de mardi 3 mars 2026 -> "),
}
"""What each prints."""


def test_each_example_is_short_and_documented():
    assert {path.stem for path in EXAMPLES} == set(OUTPUTS)
    readme = (ROOT / "configs" / "examples" / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 60
        assert f"python configs/examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
        assert f"({path.name})" in readme


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a checkpoint, in which the examples make `runs`."""
    folder = tmp_path_factory.mktemp("examples")
    cfg = presets.build("bert_base", dim=16, num_heads=4, ffn_dim=16, encoder_layers=1, vocab_size=6, num_classes=2)
    hf.save(folder / "bert", "bert", cfg, build(cfg)[1])
    (folder / "bert" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nmars\n2026\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(folder, path):
    arguments = [*(["bert"] if path.stem == "fine_tune" else []), *SHORT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, path, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for expected in OUTPUTS[path.stem]:
        assert expected in done.stdout
