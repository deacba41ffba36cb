"""The code of PyTorch's tutorials in configs/examples/README.md computes the same as that of this package."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "configs" / "examples" / "README.md"


def test_the_guided_path_runs_and_both_sides_agree():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert sum("assert_allclose" in block for block in blocks) == 8
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
