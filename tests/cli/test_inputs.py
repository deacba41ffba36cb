"""Inputs of text lines, columns and JSON objects: unchanged, lazy, and with clear errors."""

import gzip
import io
import json
import os
import sys
import threading

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.cli import inputs
from tformer_jax.cli.inputs import Source

TEXT = {"--field": "text"}
PAIR = {"--source-field": "source", "--target-field": "target"}


def read(path, content: bytes, fields=TEXT) -> list[inputs.Line]:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return list(Source([], path).lines(fields))


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz"])
def test_lines_of_text(tmp_path, name):
    actual = read(tmp_path / name, "\ufeffä\tb\r\n\n c".encode())
    assert actual == [((text,), {"text": text}) for text in ("ä\tb", "", " c")]


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_objects_keep_their_other_fields(tmp_path, name):
    records = [{"id": 7, "body": "a\nb", "more": [None, {"x": "ü"}]}, {"body": ""}]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    assert read(tmp_path / name, content, {"--field": "body"}) == [((record["body"],), record) for record in records]


def test_pairs_between_tabs_and_in_two_fields(tmp_path):
    assert read(tmp_path / "in.tsv", b"a\tb\n", PAIR) == [(("a", "b"), {"source": "a", "target": "b"})]
    assert read(tmp_path / "in.jsonl", b'{"target": "b", "source": "a"}\n', PAIR)[0].texts == ("a", "b")
    assert next(Source(["a\tb"], None).lines(PAIR)).texts == ("a", "b")


@pytest.mark.parametrize(
    ("name", "content", "fields", "problem"),
    [
        ("in.jsonl", b"{}\n", TEXT, r"line 1: has no fields"),
        ("in.jsonl", b'{"messages": []}\n', TEXT, r"only 'messages': name another with --field, or .* with --chat"),
        ("in.jsonl", b'{"text": "a"}\n{"b": 1, "c": 2}\n', TEXT, r"line 2: has no field 'text', only 'b', 'c'"),
        ("in.jsonl", b'{"text": "a"}\n{"text": 1}\n', TEXT, r"line 2: field 'text' is int, not text"),
        ("in.jsonl", b'{"text": "\\ud800"}\n', TEXT, r"line 1: field 'text' has a lone surrogate"),
        ("in.jsonl", b'{"source": "a"}\n', PAIR, r"line 1: has no field 'target'.*with --target-field"),
        ("in.jsonl", b"[1]\n", TEXT, r"line 1: is not a JSON object"),
        ("in.jsonl.gz", b'{"text": "a"}\n{"text": "a"\n', TEXT, r"line 2: is not valid JSON \("),
        ("in.jsonl", b'{"text": "a"}\n\n', TEXT, "line 2: is blank: remove it"),
        ("in.jsonl", b"[" * 100_000, TEXT, r"line 1: is not valid JSON"),
        (
            "in.jsonl",
            b'{"text": "a", "x": 1e400}\n',
            TEXT,
            r"line 1: is not valid JSON \(1e400 is not a finite 64-bit number",
        ),
        ("in.jsonl", b'{"text": "a", "x": [-Infinity]}\n', TEXT, r"line 1: is not valid JSON \(-Infinity is not a"),
        ("in.jsonl", b'{"text": "a", "x": NaN}\n', TEXT, r"line 1: is not valid JSON \(NaN is not a finite"),
        ("in.jsonl", b"1" * 5000, TEXT, r"line 1: is not valid JSON"),
        ("in.jsonl", b"", TEXT, r"is empty"),
        ("in.tsv", b"a\tb\na\n", PAIR, r"line 2: has 1 column where source<tab>target is expected"),
        ("in.txt", b"a\n\xff\n", TEXT, r"line 2: not valid UTF-8"),
    ],
)
def test_invalid_lines(tmp_path, name, content, fields, problem):
    with pytest.raises(UserError, match=problem) as caught:
        read(tmp_path / name, content, fields)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_field_that_no_line_has_is_said(tmp_path, caplog):
    """Regression test: all texts were translated into the language of `--to`, without a word."""
    fields = {"--field": "text", "--to-field": "too", "--from-field": "from"}
    content = b'{"text": "a", "to": "de", "from": "en"}\n{"text": "b", "to": "fr"}\n'
    assert [line.texts for line in read(tmp_path / "in.jsonl", content, fields)] == [("a", "", "en"), ("b", "", "")]
    assert caplog.messages == [f"no line of {tmp_path}/in.jsonl has the field 'too', which --to-field names"]


def test_a_field_that_the_output_adds_is_refused(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "out": 1}\n')
    actual = Source([], path).lines(TEXT, ("out",))
    assert next(actual).texts == ("a",)
    with pytest.raises(UserError, match="line 2: has a field 'out', a name that the output uses: rename the field"):
        next(actual)
    assert len(list(Source([], path).lines(TEXT))) == 2


def test_a_file_that_cannot_be_opened_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "in.txt"
    path.write_text("a\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(UserError, match="in.txt cannot be read: Permission denied"):
        list(Source([], path).lines(TEXT))
    with pytest.raises(UserError, match="in.txt cannot be read: Permission denied"):
        Source([], path).identity()


def test_a_truncated_gzip_file_yields_its_complete_lines(tmp_path):
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(5000).hex().encode() + b"\nend\n")[:-900])
    with pytest.raises(UserError, match=r"in.txt.gz, line 1: from here on, this is not a complete gzip file"):
        list(Source([], path).lines(TEXT))


def test_files_are_read_lazily(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"ab\n" * 1_000_000)
    source = Source([], path)
    lines = source.lines(TEXT)
    assert [next(lines).texts[0] for _ in range(3)] == ["ab"] * 3
    assert source.position == 9
    assert source.size == 3_000_000


def test_the_position_in_a_gzip_file_is_that_of_its_own_bytes(tmp_path):
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(b"ab\n" * 100_000))
    source = Source([], path)
    assert sum(1 for _ in source.lines(TEXT)) == 100_000
    assert source.position == source.size == path.stat().st_size


def test_a_pipe_gives_each_line_at_once_and_has_no_identity(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    went_on = threading.Event()

    def produce():
        with path.open("w") as pipe:
            pipe.write("a\n")
            pipe.flush()
            went_on.wait(20)
            pipe.write("b\n")

    writer = threading.Thread(target=produce)
    writer.start()
    source = Source([], path)
    lines = source.lines(TEXT)
    assert next(lines).texts == ("a",)
    went_on.set()
    assert [line.texts for line in lines] == [("b",)]
    writer.join()
    assert (source.size, source.is_file, source.identity()) == (None, False, {})


def test_standard_input_may_be_empty(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert list(Source([], None).lines(TEXT)) == []


def test_different_files_have_different_identities(tmp_path):
    single, other = tmp_path / "one", tmp_path / "other"
    single.write_bytes(b"a" * 2**21)
    other.write_bytes(b"a" * (2**21 - 1) + b"b")
    actual = Source([], single).identity()
    assert actual == Source([], single).identity()
    assert actual | {"name": "other"} != Source([], other).identity()
