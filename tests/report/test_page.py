"""The reports in a browser; see `tests.programs.report_page`. Needs playwright and a Chromium."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_browser_shows_the_reports():
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.report_page"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
