"""The floors, the style and the types hold: the same tools and settings that a contributor runs by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import readme_tables

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {
    "import-linter": ["-c", "from importlinter.cli import lint_imports_command as main; main()"],
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_clean(tool):
    done = subprocess.run([sys.executable, *TOOLS[tool]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_shows_what_was_recorded():
    assert readme_tables.readme() == (ROOT / "README.md").read_text(encoding="utf-8"), "python -m tests.readme_tables"
