"""The installed command `tformer` runs the same functions as the scripts."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tformer_jax
from tformer_jax.base.errors import UserError
from tformer_jax.cli import tformer
from tformer_jax.lab.commands import xla_flags
from tformer_jax.runs import provenance

ROOT = Path(__file__).resolve().parents[2]


def test_every_script_is_a_command_and_listed(capsys):
    tformer.main([])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert listed == {path.stem for path in (ROOT / "scripts").glob("*.py")}


def test_the_version_is_that_of_the_package(capsys):
    tformer.main(["--version"])
    assert capsys.readouterr().out == f"{tformer_jax.__version__}\n"


def test_a_command_gets_the_other_arguments(capsys):
    tformer.main(["xla_flags", "gpu", "fsdp"])
    through_tformer = capsys.readouterr().out
    xla_flags.main(["gpu", "fsdp"])
    assert through_tformer == capsys.readouterr().out != ""


@pytest.mark.parametrize(
    "path, usage, typed",
    [
        ("/usr/local/bin/tformer", "usage: tformer xla_flags ", "tformer xla_flags --help"),
        (
            str(ROOT / "tformer_jax" / "__main__.py"),
            "usage: python -m tformer_jax xla_flags ",
            "python -m tformer_jax xla_flags --help",
        ),
        ("scripts/xla_flags.py", "usage: xla_flags.py ", "python scripts/xla_flags.py --help"),
    ],
)
def test_the_usage_and_the_record_name_the_command_as_typed(monkeypatch, capsys, path, usage, typed):
    arguments = ["--help"] if path.startswith("scripts") else ["xla_flags", "--help"]
    monkeypatch.setattr("sys.argv", [path, *arguments])
    with pytest.raises(SystemExit):
        xla_flags.main(["--help"])
    assert capsys.readouterr().out.startswith(usage)
    assert provenance.command() == typed


def test_the_package_runs_as_a_program():
    command = [sys.executable, "-m", "tformer_jax", "xla_flags", "gpu", "fsdpp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m tformer_jax xla_flags ")


def test_an_unknown_command_is_refused():
    with pytest.raises(UserError, match="unknown command 'trane'; did you mean 'train'"):
        tformer.main(["trane"])


def test_the_installation_has_the_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"tformer": f"{tformer.__name__}:{tformer.run.__name__}"}
