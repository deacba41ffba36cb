"""Lines are streamed from input to output: each is written once it is ready, none is kept; progress on a terminal."""

import argparse
import io
import itertools
import tracemalloc

import pytest
from rich.console import Console

from tests.cli.kill_lines import echo
from tformer_jax.cli import lines
from tformer_jax.cli.inputs import Source
from tformer_jax.cli.progress import LinesProgress
from tformer_jax.config import ConfigError


@pytest.fixture
def source(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "in.txt"


def test_results_are_written_before_more_is_read(source, capsys):
    source.write_text("a\nb\nc\n")
    seen = []

    def results(found, skip):
        assert skip == 0
        for line in found:
            seen.append(capsys.readouterr().out)
            yield line.texts[0]

    options = argparse.Namespace(input=source, output=None, resume=False, run=source.parent / "run")
    work = lines.Work({"--field": "text"}, {}, results, lambda _, text: [text + "\r\n" + text], lambda *_: {})
    assert lines.process(options, Source([], source), work) == 0
    assert [*seen, capsys.readouterr().out] == ["", "a a\n", "b b\n", "c c\n"]


def test_a_bad_line_comes_after_the_outputs_before_it(source, tmp_path):
    source.write_bytes(b"one\ntwo\nthree\nfour\nfive\nsix\n\xff\n")
    with pytest.raises(ConfigError, match="line 7: not valid UTF-8"):
        echo(source, tmp_path / "out.txt", resume=False, sleep=0)
    found = (tmp_path / "out.txt.partial").read_text().split()
    assert found == [text for text in ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX") for _ in range(2)]


def test_memory_does_not_grow_with_the_input(source, tmp_path):
    text = "x" * 1000
    with source.open("w") as file:
        file.writelines(f"{text}\n" for _ in range(20_000))
    tracemalloc.start()
    echo(source, tmp_path / "out.txt", resume=False, sleep=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20  # of 20 MiB; the hash of the beginning takes one
    assert (tmp_path / "out.txt").stat().st_size == 2 * source.stat().st_size


def shown(source: Source, *, terminal: bool, done: int = 0, wanted: bool = True) -> str:
    """Returns what is shown after three lines."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with LinesProgress(source, done=done, shown=wanted, console=console) as progress:
        for _ in itertools.islice(source.lines({"--field": "text"}), 3):
            progress.advance()
        if terminal and wanted:
            progress._bar.refresh()
    return console.file.getvalue()


def test_progress_on_a_terminal(source):
    source.write_bytes(b"a\n" * 4)
    found = shown(Source([], source), terminal=True, done=1200)
    assert "1,203 lines" in found
    assert "lines/s" in found
    assert "75%" in found
    assert shown(Source([], source), terminal=False) == ""
    assert shown(Source([], source), terminal=True, wanted=False) == ""


def test_no_share_of_an_unknown_size():
    found = shown(Source(["a", "b", "c"], None), terminal=True)
    assert "3 lines" in found
    assert "%" not in found
