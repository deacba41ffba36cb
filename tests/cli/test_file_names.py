"""Names of files that the system refuses, that are not UTF-8, or that are links or pipes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.kill_lines import UNUSED
from tformer_jax.base.errors import UserError
from tformer_jax.cli import embed, lines, outputs
from tformer_jax.cli.inputs import Source

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "problem"),
    [(b"caf\xe9.txt", b"caf\\udce9.txt does not exist\n"), (b"x" * 300, b"x" * 300 + b": File name too long\n")],
)
def test_names_of_files_that_do_not_exist(name, problem):
    command = [sys.executable, "scripts/translate.py", "--run", "absent", "--input", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (2, b"error: " + problem)


def test_facts_of_a_file_whose_name_is_not_utf_8(tmp_path):
    facts = {"input": {"name": os.fsdecode(b"caf\xe9.txt")}}
    outputs.write_facts(tmp_path / "facts.json", facts)
    assert outputs.read_facts(tmp_path / "facts.json") == facts


def test_an_array_is_written_through_a_link(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    target, link = tmp_path / "v.npy", tmp_path / "link.npy"
    link.symlink_to(target)
    options = argparse.Namespace(output=link, run=tmp_path / "run", on_long_line="stop", field="text", **UNUSED)
    ones = lambda texts, **_: (np.ones(3, np.float32) for _ in texts)  # noqa: E731
    work = lines.Work(options, ones, embed.plain, embed.added, ())
    embed.write_array(Source(["a", "b"], None), work)
    assert link.is_symlink()
    np.testing.assert_array_equal(np.load(target), np.ones((2, 3)))


def test_an_array_is_not_written_to_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "v.npy")
    with pytest.raises(UserError, match="v.npy is not a regular file, and .npy output needs one: choose another"):
        embed.main(["--run", str(tmp_path), "--output", str(tmp_path / "v.npy"), "a"])


def test_a_compressed_array_is_refused(tmp_path):
    with pytest.raises(UserError, match="v.npy.gz: arrays are not compressed: write .npy"):
        embed.main(["--run", str(tmp_path), "--output", str(tmp_path / "v.npy.gz"), "a"])
