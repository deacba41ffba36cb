"""Lines are streamed from input to output: each is written once it is ready, none is kept; progress on a terminal."""

import argparse
import io
import itertools
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from rich.console import Console

from tests.cli.kill_lines import UNUSED, echo
from tformer_jax.base.errors import UserError
from tformer_jax.cli import lines
from tformer_jax.cli.inputs import Source
from tformer_jax.cli.lines import LinesProgress


@pytest.fixture
def source(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "in.txt"


def options(source: Path, output: Path | None, action: str = "stop") -> argparse.Namespace:
    run = source.parent / "run"
    return argparse.Namespace(output=output, resume=False, run=run, on_long_line=action, field="text", **UNUSED)


def test_results_are_written_before_more_is_read(source, capsys):
    source.write_text("a\nb\nc\n")
    seen = []

    def stream(texts, *, skip, long_texts):
        assert skip == 0
        for text in texts:
            seen.append(capsys.readouterr().out)
            yield text

    doubled = lambda _, text: [text + "\r\n" + text]  # noqa: E731
    work = lines.Work(options(source, output=None), stream, doubled, lambda *_: {}, ())
    assert lines.process_lines(Source([], source), work) == 0
    assert [*seen, capsys.readouterr().out] == ["", "a a\n", "b b\n", "c c\n"]


def test_the_options_that_determine_results_are_compared_on_resume(source):
    given = options(source, output=None)
    given.top = 5
    work = lines.Work(given, iter, list, dict, (), settings=("top",), facts={"decode": {"beams": 4}})
    actual = lines.settings_facts(work)
    assert actual["command"] == {"field": "text", "top": 5, "on_long_line": "stop"}
    assert actual["decode"] == {"beams": 4}
    assert set(actual) == {"command", "decode", "run"}


def test_outputs_before_a_bad_line_are_written(source, tmp_path):
    source.write_bytes(b"one\ntwo\nthree\nfour\nfive\nsix\n\xff\n")
    with pytest.raises(UserError, match="line 7: not valid UTF-8"):
        echo(source, tmp_path / "out.txt", resume=False, sleep=0)
    actual = (tmp_path / "out.txt.partial").read_text().split()
    assert actual == [text for text in ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX") for _ in range(2)]


def test_the_lines_after_a_bad_one_may_be_corrected(source, tmp_path):
    output = tmp_path / "out.txt"
    source.write_bytes(b"one\ntwo\n\xff\nfour\n")
    with pytest.raises(UserError, match="line 3: not valid UTF-8"):
        echo(source, output, resume=False, sleep=0)
    source.write_text("one\nTWO\nthree\n")
    with pytest.raises(UserError, match="the input has changed since .* was started: restore it"):
        echo(source, output, resume=True, sleep=0)
    source.write_text("one\ntwo\nthree\nfour, and five\n")
    echo(source, output, resume=True, sleep=0)
    assert output.read_text().split("\n")[::2] == ["ONE", "TWO", "THREE", "FOUR, AND FIVE", ""]


@pytest.mark.parametrize("name", ["out.txt", "out.jsonl"])
def test_long_lines_are_marked_and_counted(source, tmp_path, capsys, name):
    source.write_text("a\nbbb\nc\nddd\n")

    def run(action: str) -> list[str]:
        def stream(texts, *, skip, long_texts):
            for index, text in enumerate(texts):
                ids = long_texts.fit(index, [*map(ord, text)], 2, "text")
                yield "" if ids is None else "".join(map(chr, ids))

        plain, added = (lambda _, text: [text]), (lambda _, text: {"out": text})
        work = lines.Work(options(source, tmp_path / name, action), stream, plain, added, ("out",))
        lines.process_lines(Source([], source), work)
        return (tmp_path / name).read_text().splitlines()

    plain = {"truncate": ["a", "bb", "c", "dd"], "skip": ["a", "", "c", ""]}
    texts = ["a", "bbb", "c", "ddd"]
    for action, said in (("truncate", "truncated"), ("skip", "skipped")):
        actual = run(action)
        told = f"2 lines were too long for the model and were {said}; the first is {source}, line 2\n"
        assert capsys.readouterr().err == told
        if name == "out.txt":
            assert actual == plain[action]
            continue
        outs = [None if text == "" else text for text in plain[action]]
        marks = [{}, {"too_long": action}] * 2
        expected = [{"text": text, "out": out, **mark} for text, out, mark in zip(texts, outs, marks, strict=True)]
        assert [json.loads(line) for line in actual] == expected
    sentence = "in.txt, line 2: the text has 3 tokens, but the model takes at most 2: shorten it, or add --on-long-line"
    with pytest.raises(UserError, match=sentence):
        run("stop")


def shorten(source, output, action, *, resume=False, limit=2):
    """Writes the lines of a file, of which a model takes `limit` characters; returns what `report` is called with."""

    def stream(texts, *, skip, long_texts):
        for index, text in enumerate(texts):
            if index >= skip:
                yield "".join(map(chr, long_texts.fit(index, [*map(ord, text)], limit, "text") or ""))

    given, reported = options(source, output, action), []
    given.resume = resume
    work = lines.Work(given, stream, lambda _, text: [text], lambda *_: {}, ())
    try:
        lines.process_lines(Source([], source), work, reported.append)
    except UserError as error:
        reported.append(str(error).partition(": ")[2])
    return reported


def test_long_lines_are_counted_before_an_error(source, tmp_path, capsys):
    """Regression test: those before an error, and after a resume those before it, were never told."""
    source.write_bytes(b"aaa\nbbb\n\xff\n")
    assert shorten(source, tmp_path / "out.txt", "truncate")[0] == 0
    told = "lines were too long for the model and were truncated; the first is"
    assert capsys.readouterr().err == f"2 {told} {source}, line 1\n"
    source.write_text("aaa\nbbb\nccc\nddd\n")
    assert shorten(source, tmp_path / "out.txt", "truncate", resume=True) == [2]
    assert capsys.readouterr().err == f"2 {told.replace('lines', 'lines after line 2')} {source}, line 3\n"


@pytest.mark.parametrize("name", ["out.txt", "out.jsonl"])
def test_a_command_that_a_long_line_stopped_resumes_as_its_error_advises(name, source, tmp_path, capsys):
    """Regression test: it "was started by another command". Any other change of the flag is one."""
    source.write_text("a\nbbb\nc\n")
    (problem,) = shorten(source, tmp_path / name, "stop")[1:]
    assert "add --on-long-line truncate or skip" in problem
    assert shorten(source, tmp_path / name, "skip", resume=True) == [1]
    assert "1 line after line 1 was too long" in capsys.readouterr().err
    if name == "out.txt":
        assert (tmp_path / name).read_text() == "a\n\nc\n"
    with pytest.raises(UserError, match="command.on_long_line: 'skip' -> 'truncate'"):
        lines.process_lines(Source([], source), resumed(source, tmp_path / name, "truncate"))


def resumed(source: Path, output: Path, action: str) -> lines.Work:
    given = options(source, output, action)
    given.resume = True
    return lines.Work(given, iter, list, dict, ())


@pytest.mark.long
def test_memory_does_not_grow_with_the_input(source, tmp_path):
    text = "x" * 1000
    with source.open("w") as file:
        file.writelines(f"{text}\n" for _ in range(6_000))
    tracemalloc.start()
    echo(source, tmp_path / "out.txt", resume=False, sleep=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20  # of 6 MB; the hash of the beginning takes one
    assert (tmp_path / "out.txt").stat().st_size == 2 * source.stat().st_size


def shown(source: Source, *, terminal: bool, done: int = 0, wanted: bool = True) -> str:
    """Returns the display after three lines."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with LinesProgress(source, done=done, shown=wanted, console=console) as progress:
        for _ in itertools.islice(source.lines({"--field": "text"}), 3):
            progress.advance()
        if terminal and wanted:
            progress._bar.refresh()
    return console.file.getvalue()


def test_progress_on_a_terminal(source):
    source.write_bytes(b"a\n" * 4)
    actual = shown(Source([], source), terminal=True, done=1200)
    assert "1,203 lines" in actual
    assert "lines/s" in actual
    assert "75%" in actual
    assert shown(Source([], source), terminal=False) == ""
    assert shown(Source([], source), terminal=True, wanted=False) == ""


@pytest.mark.parametrize("kind", ["arguments", "standard input", "pipe", "zst"])
def test_no_share_of_an_unknown_size(kind, tmp_path, monkeypatch):
    text, path = b"a\nb\nc\n", tmp_path / "in.zst"
    if kind == "zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(text)
    else:
        reader, writer = os.pipe()
        os.write(writer, text)
        os.close(writer)
        monkeypatch.setattr("sys.stdin", os.fdopen(reader))
        path = Path(f"/dev/fd/{reader}")
    given = {"arguments": (["a", "b", "c"], None), "standard input": ([], None)}
    actual = shown(Source(*given.get(kind, ([], path))), terminal=True)
    assert "3 lines" in actual
    assert "%" not in actual
