"""Commands parse their flags before they import JAX, and reuse compiled programs."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import filelock
import jax
import pytest

from tformer_jax.base import user_cache, workarounds
from tformer_jax.cli import compilation_cache
from tformer_jax.lab.commands import benchmark

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "benchmark")
HEAVY = {"jax", "flax", "optax", "orbax", "torch"}


def run_without_cache_settings(program: str, cache: Path, *flags: str, **variables: str) -> str:
    """Returns the output of a process with a user cache folder and no variable of JAX's cache set."""
    remaining = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment = {**remaining, "XDG_CACHE_HOME": str(cache), "HOME": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "-c", program, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.long
def test_flags_are_read_before_jax_is_imported(tmp_path):
    """For the help, and for a flag that does not exist."""
    calls = [(script, flag) for script in SCRIPTS for flag in ("--help", "--no-such-flag")]
    program = f"""
import importlib, sys
from tformer_jax.cli.common import run_main
from tformer_jax.cli.tformer import command_package
for script, flag in {calls!r}:
    sys.argv = [script, flag]
    try:
        run_main(importlib.import_module(f"{{command_package(script)}}.{{script}}").main)
    except SystemExit:
        pass
    print("loaded:", script, flag, sorted({HEAVY!r} & sys.modules.keys()))
"""
    actual = [line for line in run_without_cache_settings(program, tmp_path).splitlines() if line.startswith("loaded:")]
    assert actual == [f"loaded: {script} {flag} []" for script, flag in calls]


@pytest.fixture
def caches(tmp_path, monkeypatch) -> Path:
    """An empty user cache folder, with no variable that overrides it."""
    for name in (user_cache.VARIABLE, compilation_cache.FOLDER, compilation_cache.SWITCH, *compilation_cache.SETTINGS):
        monkeypatch.setenv(name, "")  # so that the variable is restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_a_folder_of_the_users_is_used(caches, monkeypatch):
    compilation_cache.enable_cache()
    folder = caches / "tformer_jax" / "xla" / compilation_cache.processor_name()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(caches / "home"))
    assert user_cache.default_folder() == caches / "home" / ".cache" / "tformer_jax"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache.default_folder() == caches / "home" / "Library" / "Caches" / "tformer_jax"


@pytest.mark.parametrize(
    ("backend", "processes", "named", "disabled"),
    [("gpu", 2, False, True), ("gpu", 1, False, False), ("cpu", 2, False, False), ("gpu", 2, True, False)],
)
def test_several_processes_on_gpus_share_a_cache_or_have_none(caches, monkeypatch, backend, processes, named, disabled):
    changed = []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(type(jax.config), "update", lambda _, *setting: changed.append(setting))
    if named:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(caches / "shared"))
    compilation_cache.enable_cache()
    compilation_cache.disable_if_private(processes)
    assert changed == ([("jax_enable_compilation_cache", False)] if disabled else [])


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAX_COMPILATION_CACHE_DIR", "mine"), ("JAX_ENABLE_COMPILATION_CACHE", "False"), ("TFORMER_CACHE_DIR", "")],
)
def test_environment_variables_of_the_user_take_precedence(caches, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    before = {user_cache.VARIABLE: str(caches / "tformer_jax"), **os.environ}
    compilation_cache.enable_cache()
    assert dict(os.environ) == before
    assert list(caches.iterdir()) == []


def test_an_unwritable_folder_gives_a_warning(caches, caplog):
    (caches / "tformer_jax").write_text("a file")
    with caplog.at_level(logging.WARNING):
        compilation_cache.enable_cache()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert len(caplog.records) == 1


def test_an_entry_that_was_not_finished_is_removed(tmp_path):
    for name in ("whole-cache", "whole-atime", "partial-cache"):
        (tmp_path / name).write_text("")
    with filelock.FileLock(tmp_path / ".lockfile"):
        workarounds.remove_unfinished_programs(tmp_path)
        assert (tmp_path / "partial-cache").exists()
    workarounds.remove_unfinished_programs(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["whole-atime", "whole-cache"]


@pytest.mark.slow
def test_the_next_process_compiles_nothing_and_the_cache_stays_small(tmp_path):
    program = """
import sys
from tformer_jax.cli import compilation_cache
compilation_cache.enable_cache()
import jax
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
for power in map(int, sys.argv[1:]):
    jax.jit(lambda x: x**power + power)(1.0).block_until_ready()
print("hits", sum(name.endswith("cache_hits") for name in found))
"""
    assert "hits 0" in run_without_cache_settings(program, tmp_path, "3")
    assert "hits 1" in run_without_cache_settings(program, tmp_path, "3")
    folder = tmp_path / "tformer_jax" / "xla" / compilation_cache.processor_name()
    (first,) = folder.glob("*-cache")
    room = {"JAX_COMPILATION_CACHE_MAX_SIZE": str(first.stat().st_size * 5 // 2)}
    run_without_cache_settings(program, tmp_path, "4", "5", "6", "7", **room)
    assert not first.exists()
    assert sum(path.stat().st_size for path in folder.glob("*-cache")) <= int(room["JAX_COMPILATION_CACHE_MAX_SIZE"])


@pytest.mark.parametrize(
    "flags", [["attention", "--length", "-5"], ["attention", "--repeat", "0"], ["data", "--seconds", "nan"]]
)
def test_sizes_of_benchmarks_are_positive(flags, capsys):
    with pytest.raises(SystemExit):
        benchmark.parser().parse_args(flags)
    assert f"argument {flags[1]}: {flags[2]} is not a" in capsys.readouterr().err
