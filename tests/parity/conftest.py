"""Checkpoints imported by the command, which several modules use."""

import contextlib
import io

import pytest

from tests.parity import checkpoints
from tformer_jax.cli import import_hf


@pytest.fixture(scope="package")
def imported(tmp_path_factory):
    """Returns a function that makes the folder, the run and their model of a kind, once."""
    made = {}

    def make(kind: str):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = checkpoints.MAKERS[kind](folder)
            run = folder.with_name(f"{folder.name}_run")
            with contextlib.redirect_stdout(io.StringIO()):  # which tests read
                import_hf.main([str(folder), "--run", str(run)])
            made[kind] = folder, run, model
        return made[kind]

    return make
