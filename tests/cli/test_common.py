"""Flags that commands share."""

import importlib
from pathlib import Path

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import common, tformer

READERS = "attention classify embed evaluate explain export_hf fill_mask generate score serve translate"
"""Commands that compute with the weights of a run."""


@pytest.mark.parametrize("command", READERS.split())
def test_commands_that_compute_with_a_run_take_a_step_and_a_mesh(command, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{tformer.command_package(command)}.{command}").main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--run DIR", "--step N", "--mesh AXIS=SIZE"))


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["translate", "--run", "A", "--run", "B", "x"], "--run"),
        (["evaluate", "--run", "A", "--step", "1", "--step", "2"], "--step"),
        (["evaluate", "--run", "A", "--mesh", "data=1", "--mesh", "data=2"], "--mesh"),
        (["train", "--config", "a.py", "--config", "b.py"], "--config"),
        (["generate", "--run", "A", "--temperature", "1", "--temperature", "2", "x"], "--temperature"),
        (["serve", "--run", "A", "--port", "1", "--port=2"], "--port"),
        (["vocabulary", "trim", "A", "--output", "B", "--output", "C"], "--output"),
    ],
)
def test_a_flag_that_is_written_twice_is_refused(arguments, flag, capsys):
    with pytest.raises(SystemExit) as ended:
        tformer.main(arguments)
    assert ended.value.code == 2
    assert f"{flag}: is written twice; write it once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["translate", "--run", "A", "--beems", "4", "x"], "unknown flag '--beems'; did you mean '--beams'"),
        (["train", "--config", "translate_cldr", "--rnu=x"], "unknown flag '--rnu'; did you mean '--run'"),
        (["train", "--config", "translate_cldr", "-x"], "unknown flag '-x'; .* --help lists the flags"),
        (["evaluate", "--run", "A", "--zzz"], "unknown flag '--zzz'; .* --help lists the flags"),
        (
            ["train", "--config", "translate_cldr", "--config.seed=1", "--config.seed", "2"],
            "--config.seed is written tw",
        ),
    ],
)
def test_an_unknown_flag_or_a_setting_written_twice_is_named(arguments, problem):
    with pytest.raises(UserError, match=problem):
        tformer.main(arguments)


def test_an_unknown_flag_is_named_where_a_needed_one_is_missing(capsys):
    with pytest.raises(SystemExit) as ended:
        tformer.main(["train", "--confg", "translate_cldr"])
    assert ended.value.code == 2
    needed = "the following arguments are required: --config"
    assert f"{needed}; '--confg' is unknown; did you mean '--config'?" in capsys.readouterr().err


def test_settings_are_no_unknown_flags_where_another_flag_is_wrong(capsys):
    """Regression test: the message said that a setting was unknown."""
    with pytest.raises(SystemExit):
        tformer.main(
            ["sweep", "--config", "classify_cldr", "--config.model.dim=32", "--sweep", "seed=0", "--jobs", "0"]
        )
    assert capsys.readouterr().err.endswith("--jobs: 0 is not an integer of at least 1\n")


def test_flags_that_may_be_repeated(capsys):
    from tformer_jax.cli import generation

    parser = generation.make_parser("translate", "", "--n-best")
    options = parser.parse_args(["--run", "A", "--stop", "a", "--stop", "b", "x"])
    assert options.stop == ["a", "b"]
    again = generation.make_parser("translate", "", "--n-best")
    assert [again.parse_args(["--run", run, "x"]).run.name for run in "AB"] == ["A", "B"]


def test_a_new_folder_is_not_the_working_directory(tmp_path, monkeypatch):
    """Regression test: `.` ended in a traceback, and its full name in a folder that no longer exists."""
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        with pytest.raises(UserError, match="contains the working directory, which would be replaced: choose another"):
            common.check_new_folder(Path(name))
    common.check_new_folder(Path("new"))
