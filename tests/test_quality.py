"""The layers contract, style and types, checked with the tools and settings that contributors run by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import rest_slow
from tests.programs import readme_tables

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {
    "import-linter": ["-c", "from importlinter.cli import lint_imports_command as main; main()"],
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],
}


@pytest.mark.parametrize("tool", rest_slow(TOOLS.keys(), 3))  # `.ci/run` starts mypy itself
def test_clean(tool):
    done = subprocess.run([sys.executable, *TOOLS[tool]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", readme_tables.TABLES)
def test_the_readmes_show_what_was_recorded(name):
    assert readme_tables.filled(name) == (ROOT / name).read_text(encoding="utf-8"), (
        "run python -m tests.programs.readme_tables"
    )


@pytest.mark.parametrize("path", sorted(ROOT.glob("**/README.md")), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_the_readmes_exist(path):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert not missing
