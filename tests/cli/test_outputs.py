"""Output files are complete or absent, and output interrupted at any byte is resumed without a difference."""

import errno
import fcntl
import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.kill_lines import echo
from tests.helpers import rest_slow
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.cli import common, outputs

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["one", "", "drei – три", "four\tfour", "five", "six", "seven"]
FACTS = {"decode": {"beams": 4, "stop": ("a",)}, "input": {"bytes": 7}}


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return tmp_path / "in.txt"


def identity(_: int | None = None) -> dict[str, int]:
    return FACTS["input"]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("in.txt", "run"))


def content(path: Path) -> str:
    return (gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")).read()


def whole_text(name: str) -> str:
    if "jsonl" in name:
        return "".join(json.dumps({"text": t, "out": t.upper()}, ensure_ascii=False) + "\n" for t in TEXTS)
    return "".join(f"{text.upper()}\n" * 2 for text in TEXTS)


@pytest.mark.long
@pytest.mark.parametrize("name", rest_slow(["out.txt", "out.jsonl.gz", "out.txt.gz", "out.jsonl"], 2))
def test_interrupted_at_any_byte_and_resumed_is_the_same_file(source, name):
    output, whole = source.with_name(name), whole_text(name)
    echo(source, output, resume=False, sleep=0)
    expected = output.read_bytes()
    assert content(output) == whole
    assert left(source.parent) == [name, f"{name}.provenance.json"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(outputs.PartialFile, "finish", interrupt)
        echo(source, output, resume=False, sleep=0)
    partial = source.with_name(f"{name}.partial")
    facts = source.with_name(f"{name}.partial.json").read_bytes()
    assert partial.read_text(encoding="utf-8") == whole
    for size in range(len(whole.encode()) + 1):
        output.unlink()
        partial.write_bytes(whole.encode()[:size])
        source.with_name(f"{name}.partial.json").write_bytes(facts)
        echo(source, output, resume=True, sleep=0)
        assert output.read_bytes() == expected
        assert left(source.parent) == [name, f"{name}.provenance.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.txt"])
def test_killed_again_and_again(source, name):
    texts = [f"text {number}" for number in range(120)]
    source.write_text("".join(f"{text}\n" for text in texts))
    output = source.with_name(name)
    echo(source, output, resume=False, sleep=0)
    expected = output.read_bytes()
    output.unlink()
    command = [sys.executable, "-m", "tests.cli.kill_lines", str(source), str(output), "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) >= 3
    assert output.read_bytes() == expected
    assert left(source.parent) == [name, f"{name}.provenance.json"]


def write(path: Path, count: int, *, facts=FACTS, resume=False, lines=2) -> None:
    """Writes lines up to `count` to an output file, then is interrupted."""
    settings = {topic: values for topic, values in facts.items() if topic != "input"}
    with (
        pytest.raises(KeyboardInterrupt),
        outputs.open_output(path, settings, lambda _=None: facts["input"], lines_per_text=lines, resume=resume) as file,
    ):
        for number in range(file.done, count):
            file.write([str(number)] * lines)
        raise KeyboardInterrupt


def test_an_interruption_keeps_partial_results_and_the_old_file(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    write(path, 0)
    assert left(tmp_path) == ["out.txt"]
    write(path, 2)
    assert left(tmp_path) == ["out.txt", "out.txt.partial", "out.txt.partial.json"]
    assert (path.read_text(), (tmp_path / "out.txt.partial").read_text()) == ("old", "0\n0\n1\n1\n")


def test_each_line_is_written_before_the_next_is_computed(tmp_path):
    path = tmp_path / "out.txt"
    with outputs.open_output(path, {}, identity, lines_per_text=1, resume=False) as file:
        for number in range(3):
            file.write([f"{number}"])
            assert (tmp_path / "out.txt.partial").read_text().split() == [str(n) for n in range(number + 1)]
    assert path.read_text() == "0\n1\n2\n"


def refused(path: Path, problem: str, error=UserError, **options) -> None:
    with pytest.raises(error, match=problem) as caught:
        write(path, 3, **options)
    assert "\n" not in str(caught.value)


def test_outputs_that_cannot_be_resumed(tmp_path):
    path = tmp_path / "out.txt"
    partial, facts = tmp_path / "out.txt.partial", tmp_path / "out.txt.partial.json"
    write(path, 2)
    refused(path, r"out.txt.partial holds 2 results of an interrupted command: add --resume")
    other = {"decode": {"beams": 5, "stop": ("a",)}, "input": {"bytes": 7, "name": "x"}}
    problem = r"started by another command \(decode.beams: 4 -> 5; input.name: None -> 'x'\)"
    refused(path, problem, facts=other, resume=True)
    with partial.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(path, "is being written by another process", resume=True)
    assert partial.read_text() == "0\n0\n1\n1\n"
    facts.write_text("{")
    refused(path, "cannot be resumed, because .*out.txt.partial.json is missing or damaged", resume=True)
    facts.unlink()
    refused(path, "cannot be resumed, because .*out.txt.partial.json is missing or damaged", resume=True)
    partial.write_text("0\n0")
    write(path, 1, resume=True)
    assert partial.read_text() == "0\n0\n"


def test_facts_of_older_files_that_have_no_topic_differ():
    """Regression test: `--resume` ended in a traceback where a language was given."""
    old, new = {"decode": {"beams": 4}, "to": "de"}, {"decode": {"beams": 4}, "languages": {"to": "de"}, "input": {}}
    assert outputs.fact_differences(old, new) == ["to: 'de' -> None", "languages.to: None -> 'de'"]
    assert outputs.fact_differences(new, new) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [("nowhere/out.txt", "folder nowhere does not exist"), (".", "is a folder"), ("out.zst", "write .gz")],
)
def test_invalid_output_paths(path, problem):
    with pytest.raises(UserError, match=problem):
        outputs.check_output(Path(path))


@pytest.mark.parametrize(
    "name", ["config.json", "result.json", "metrics.jsonl", "outputs/test.json", "checkpoints/8/state/x", "weights/y"]
)
def test_files_of_a_run_are_not_replaced(tmp_path, name):
    """Regression test: `evaluate.py --record` in the run folder replaced the result of the training."""
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for check in (outputs.check_output, common.check_writable):
        check(path)  # of no run
    for needed in ("config.json", "provenance.json"):
        (tmp_path / "run" / needed).write_text("{}")
    for check in (outputs.check_output, common.check_writable):
        with pytest.raises(UserError, match=f"{path}: is a file of the run {tmp_path / 'run'}; name another"):
            check(path)
        check(tmp_path / "run" / "report.html")


def test_a_file_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outputs.PartialFile, "begin", fail)
    with pytest.raises(OSError):
        write(tmp_path / "out.txt", 3)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_reported_and_nothing_is_lost(tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if b"2" in data:
                self.file.write(data[:3])
                self.file.flush()
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    begin = outputs.PartialFile.begin

    def started(self, *arguments):
        begin(self, *arguments)
        self._file = Full(self._file)

    path = tmp_path / "out.txt"
    with monkeypatch.context() as patch:
        patch.setattr(outputs.PartialFile, "begin", started)
        problem = r"out.txt cannot be written \(No space left on device\): free some space and repeat the command with"
        refused(path, problem, error=RunError)
    write(path, 3, resume=True)
    assert (tmp_path / "out.txt.partial").read_text() == "0\n0\n1\n1\n2\n2\n"


def test_standard_output_shows_each_text_at_once(capsys):
    with outputs.open_output(None, {}, identity, lines_per_text=1, resume=False) as printed:
        printed.write(["a", "b"])
        assert capsys.readouterr().out == "a\nb\n"


def test_lines_and_records():
    assert outputs.join_lines("a\r\n\nb\u2028c") == "a b\u2028c"
    assert outputs.format_record({"x": "ü"}) == '{"x": "ü"}'
    assert json.loads(outputs.format_record({"x": "ü", "y": "\ud800"})) == {"x": "ü", "y": "\ud800"}


def test_the_output_cannot_be_the_input(source):
    for path in (source, source.with_name("link.txt"), source.parent / "run" / ".." / "in.txt"):
        if not path.exists():
            path.symlink_to(source)
        with pytest.raises(UserError, match=r"is both --input and --output: choose another --output"):
            outputs.check_output(path, source)
    outputs.check_output(source.with_name("new.txt"), source)


def test_a_link_is_kept_and_its_target_is_written(source):
    target = source.parent / "run" / "real.txt"
    target.write_text("old")
    link = source.with_name("out.txt")
    link.symlink_to(target)
    echo(source, link, resume=False, sleep=0)
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == whole_text("out.txt")


def test_a_pipe_is_written_to_and_kept(source):
    pipe = source.with_name("pipe")
    os.mkfifo(pipe)
    actual = []
    reader = threading.Thread(target=lambda: actual.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    echo(source, pipe, resume=False, sleep=0)
    assert pipe.is_fifo()
    reader.join(20)
    assert actual == [whole_text("pipe")]
    assert left(source.parent) == ["pipe"]


def test_a_pipe_without_a_reader_is_reported(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: pipe.open().close(), daemon=True)
    reader.start()
    with (
        pytest.raises(RunError, match=r"pipe cannot be written \(Broken pipe\)"),
        outputs.open_output(pipe, {}, identity, lines_per_text=1, resume=False) as output,
    ):
        reader.join(20)
        output.write(["a"])


def test_a_complete_output_is_not_computed_again(source, capsys):
    output = source.with_name("out.txt")
    echo(source, output, resume=True, sleep=0)
    made = output.stat().st_mtime_ns
    with pytest.raises(SystemExit) as ended:
        echo(source, output, resume=True, sleep=0)
    assert ended.value.code == 0
    assert f"{output} is complete: remove it, or leave out --resume, to write it again" in capsys.readouterr().err
    assert output.stat().st_mtime_ns == made
    echo(source, output, resume=False, sleep=0)
    assert output.stat().st_mtime_ns > made


def test_a_complete_output_of_another_command_is_refused(source):
    output, provenance = source.with_name("out.txt"), source.with_name("out.txt.provenance.json")
    echo(source, output, resume=False, sleep=0)
    source.write_text("one\n")
    with pytest.raises(UserError, match=r"out.txt was written by another command \(input.bytes: .* remove it, or"):
        echo(source, output, resume=True, sleep=0)
    provenance.unlink()
    with pytest.raises(
        UserError,
        match=r"out.txt exists, but out.txt.provenance.json, .* is missing or damaged: remove it, or",
    ):
        echo(source, output, resume=True, sleep=0)


def test_killed_between_the_two_steps_of_finishing(source):
    output, provenance = source.with_name("out.txt"), source.with_name("out.txt.provenance.json")
    echo(source, output, resume=False, sleep=0)
    saved, facts = provenance.read_text(), source.with_name("out.txt.partial.json")
    facts.write_text(json.dumps({**json.loads(saved), outputs.COMPLETE: {}}))
    provenance.write_text("of an older output")
    with pytest.raises(SystemExit):
        echo(source, output, resume=True, sleep=0)
    assert left(source.parent) == ["out.txt", provenance.name]
    assert json.loads(provenance.read_text()) == json.loads(saved)


def test_facts_of_a_deleted_partial_file_are_not_those_of_an_older_output(source):
    """Regression test: the older output was called complete, with the settings of the killed command."""
    output, provenance = source.with_name("out.txt"), source.with_name("out.txt.provenance.json")
    echo(source, output, resume=False, sleep=0)
    saved = provenance.read_text()
    killed = {**json.loads(saved), "settings": {"beams": 4}}
    source.with_name("out.txt.partial.json").write_text(json.dumps(killed))
    source.write_text("another input\n")
    with pytest.raises(UserError, match="out.txt was written by another command"):
        echo(source, output, resume=True, sleep=0)
    assert provenance.read_text() == saved


@pytest.mark.parametrize("name", ["out.txt.partial", "out.txt.partial.json", "out.txt.provenance.json"])
def test_an_input_that_the_output_replaces_is_refused(tmp_path, name):
    """Regression test: it was truncated."""
    (tmp_path / name).write_text("abc")
    with pytest.raises(UserError, match=f"{name} is a file that --output .*out.txt replaces"):
        outputs.check_output(tmp_path / "out.txt", tmp_path / name)


def test_numbers_that_are_not_finite_are_null():
    """Regression test: NaN and Infinity are not JSON."""
    line = outputs.format_record({"log_probability": float("-inf"), "embedding": [1.5, float("nan")]})
    assert line == '{"log_probability": null, "embedding": [1.5, null]}'
