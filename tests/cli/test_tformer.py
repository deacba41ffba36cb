"""The installed command `tformer` runs the same functions as the scripts."""

import tomllib
from pathlib import Path

import pytest

from tformer_jax.cli import tformer, xla_flags
from tformer_jax.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_every_script_is_a_command_and_listed(capsys):
    tformer.main([])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert listed == {path.stem for path in (ROOT / "scripts").glob("*.py")}


def test_a_command_gets_the_other_arguments(capsys):
    tformer.main(["xla_flags", "gpu", "fsdp"])
    through_tformer = capsys.readouterr().out
    xla_flags.main(["gpu", "fsdp"])
    assert through_tformer == capsys.readouterr().out != ""


def test_an_unknown_command_is_refused():
    with pytest.raises(ConfigError, match="unknown command 'trane': write one of train, translate"):
        tformer.main(["trane"])


def test_the_installation_has_the_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"tformer": f"{tformer.__name__}:{tformer.run.__name__}"}
