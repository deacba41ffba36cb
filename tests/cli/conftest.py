"""Runs that several modules load."""

from pathlib import Path

import pytest

from tests.cli.finished_runs import RunsOfEachFamily


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Runs of each family, made where a test reads one. Tests change only copies of them."""
    return RunsOfEachFamily(tmp_path_factory.mktemp("runs"))
