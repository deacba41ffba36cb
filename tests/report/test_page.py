"""The reports in a real browser; see `page.py`. Collected where playwright and a Chromium are installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_browser_shows_the_reports():
    done = subprocess.run([sys.executable, "-m", "tests.report.page"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
