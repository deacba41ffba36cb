"""Mistakes in corpus files: each gives one sentence that names the file, or is skipped, counted and reported."""

import dataclasses
import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest

from tests.data.corpus_files import config, write, zstd
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.data.corpora import DataError, load_corpus, stream_corpus
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.lab.commands import machine_checks

TRUNCATED = gzip.compress("".join(f"{n}\t-{n}\n" for n in range(5000)).encode())[:-3000]
MISTAKES = [
    ("text", {}, r"a\.txt does not exist: put it there, or name another folder with --data DIR"),
    ("text", {"a.txt": b""}, r"a\.txt is empty"),
    ("text", {"a.txt": b" \n\n"}, r"a\.txt is empty"),
    ("text", {"a.txt": b"one\ntwo\n\xff\n"}, r"a\.txt, line 3: not valid UTF-8"),
    (
        "jsonl",
        {"a.parquet": b"PAR1\x15\xff\n"},
        r"parquet, line 1: this is a Parquet file, which data\.source='parquet'",
    ),
    ("lines", {"a.txt": "one\nzwölf\n".encode("latin-1")}, r"a\.txt, line 2: not valid UTF-8"),
    ("text", {"a.gz": b"plain"}, r"a\.gz, line 1: from here on, this is not a complete gzip file"),
    ("tsv", {"a.gz": TRUNCATED}, r"a\.gz, line \d+: from here on, this is not a complete gzip file"),
    (
        "tsv",
        {"a.zst": zstd(b"a\tb\n" * 9)[:-5]},
        r"a\.zst, line \d+: from here on, this is not a complete zstd file",
    ),
    ("tsv", {"a.tsv": b"a\tb\nc\n"}, r"a\.tsv, line 2: has 1 column where source<tab>target"),
    ("tsv", {"a.tsv": b"a\tb\tc\n"}, r"a\.tsv, line 1: has 3 columns"),
    ("tsv", {"a.tsv": b"a\tb\n"}, r"a\.tsv is too short to hold out"),
    ("text", {"a.txt": b"a"}, r"a\.txt is too short to hold out data.validation_fraction=0.1 of it: name validation"),
    ("jsonl", {"a.jsonl": b'{"source": "a", "target": "b"}\n{"source"\n'}, r"a\.jsonl, line 2: is not valid JSON"),
    ("jsonl", {"a.jsonl": b'{"source": "a"}\n'}, r"a\.jsonl, line 1: has no field 'target', only 'source': set data"),
    ("jsonl", {"a.jsonl": b'{"source": "a", "target": 3}\n'}, r"a\.jsonl, line 1: field 'target' is int, not text"),
    (
        "jsonl",
        {"a.jsonl": b'{"source": "a", "target": "\\ud800"}\n'},
        r"a\.jsonl, line 1: field 'target' has a lone surrogate, which is not a character",
    ),
    ("jsonl", {"a.jsonl": b"[]\n"}, r"a\.jsonl, line 1: is not an object with named fields"),
    ("jsonl", {"a.jsonl": b"[" * 100_000 + b"\n"}, r"a\.jsonl, line 1: is not valid JSON"),
    ("jsonl", {"a.jsonl": b"1" * 5000 + b"\n"}, r"a\.jsonl, line 1: is not valid JSON"),
    (
        "parquet",
        {"a.parquet": b"PAR1 nothing"},
        r"a\.parquet, line 1: this is not a complete Parquet",
    ),
    (
        "parallel_lines",
        {"a.en": b"1\n2\n3\n", "a.de": b"1\n2\n"},
        r"a\.en, line 3: has no partner, because .*a\.de ends after 2 lines: one of the files",
    ),
    ("parallel_lines", {"a.en": b"1\n\xff\n", "a.de": b"1\n2\n"}, r"a\.en, line 2: not valid UTF-8"),
    ("tsv", {"a.tsv": b"c\n"}, r"is expected; data\.on_bad_line='skip' skips malformed lines and files$"),
]


@pytest.mark.parametrize(("source", "files", "sentence"), MISTAKES)
def test_mistakes(tmp_path, source, files, sentence):
    write(tmp_path, **files)
    name = "a.{lang}" if source == "parallel_lines" else next(iter(files), "a.txt")
    family = "decoder_lm" if source in ("text", "lines") else "seq2seq"
    with pytest.raises(DataError, match=sentence) as caught:
        load_corpus(config(source, name, family), tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_lines_are_skipped_counted_and_reported(tmp_path, caplog):
    write(tmp_path, **{"a.tsv": b"1\t2\n\xff\t3\nalone\n4\t5\nalone\n"})
    cfg = config("tsv", "a.tsv", validation="a.tsv", on_bad_line="skip")
    corpus = load_corpus(cfg, tmp_path)
    assert corpus.train == corpus.validation == [{"source": "1", "target": "2"}, {"source": "4", "target": "5"}]
    assert "a.tsv: malformed lines skipped: 1, the first at line 2: not valid UTF-8" in caplog.text
    assert "a.tsv: malformed lines skipped: 2, the first at line 3: has 1 column" in caplog.text
    splits = stream_corpus(cfg, tmp_path)
    for _ in range(2):
        assert len(list(splits.train)) == 2
    assert sorted(splits.bad["train"].reasons().values()) == [1, 2]


def test_what_was_read_before_the_damage_is_kept_when_bad_lines_are_skipped(tmp_path):
    write(tmp_path, **{"a.gz": TRUNCATED, "a.en": b"1\n2\n3\n", "a.de": b"-1\n\xff\n"})
    read = load_corpus(config("tsv", "a.gz", validation="a.gz", on_bad_line="skip"), tmp_path).train
    assert len(read) > 1000
    assert read == [{"source": str(n), "target": f"-{n}"} for n in range(len(read))]


def test_a_malformed_line_takes_its_partner_along(tmp_path):
    write(tmp_path, **{"a.en": b"1\n2\n3\n", "a.de": b"-1\n\xff\n-3\n"})
    cfg = config("parallel_lines", "a.{lang}", validation="a.{lang}", on_bad_line="skip")
    assert [pair["source"] for pair in load_corpus(cfg, tmp_path).train] == ["1", "3"]


@pytest.mark.parametrize("on_bad_line", ["stop", "skip"])
@pytest.mark.parametrize("files", [(b"1\n2\n3\n", b"-1\n-2\n"), (b"1\n", b"-1\n-2\n")])
def test_files_of_unequal_length_always_stop(files, on_bad_line, tmp_path):
    """Regression test: with "skip", 499 of 500 pairs were misaligned; the message recommended that setting."""
    write(tmp_path, **{"a.en": files[0], "a.de": files[1]})
    cfg = config("parallel_lines", "a.{lang}", validation="a.{lang}", on_bad_line=on_bad_line)
    for command in (load_corpus, stream_and_train, lambda cfg, root: prepare(cfg, root, root / "prepared")):
        with pytest.raises(DataError, match="has no partner") as raised:
            command(cfg, tmp_path)
        assert "skip" not in str(raised.value)


def test_a_split_without_a_readable_line(tmp_path):
    write(tmp_path, **{"a.tsv": b"1\t2\n", "b.tsv": b"alone\n"})
    cfg = config("tsv", "a.tsv", validation="b.tsv", on_bad_line="skip")
    with pytest.raises(DataError, match="split validation has no valid example; malformed lines skipped: 1"):
        load_corpus(cfg, tmp_path)


def test_a_training_split_without_a_readable_line(tmp_path):
    write(tmp_path, **{"a.tsv": b"alone\n", "b.tsv": b"1\t2\n"})
    cfg = config("tsv", "a.tsv", validation="b.tsv", on_bad_line="skip")
    sentence = "split train has no valid example; malformed lines skipped: 1, 1 of them: has 1 column where source"
    for command in (load_corpus, stream_and_train, lambda cfg, root: prepare(cfg, root, root / "prepared")):
        with pytest.raises(DataError, match=sentence):
            command(cfg, tmp_path)


def stream_and_train(cfg: Config, root: Path) -> None:
    train_tokenizers(cfg.data, stream_corpus(cfg, root).train)


def test_skipped_lines_are_named_if_nothing_is_left_to_hold_out(tmp_path):
    write(tmp_path, **{"a.jsonl": b'{"source": "1", "target": "2"}\n' * 9 + b"{\n"})
    cfg = config("jsonl", "a.jsonl", fields=("en", "de"), on_bad_line="skip")
    sentence = (
        r"a.jsonl is too short to hold out .*: name validation data in data.validation; malformed lines skipped: 10, 9 "
        "of them: has no field 'en', only 'source', 'target': set data.fields"
    )
    with pytest.raises(DataError, match=sentence):
        load_corpus(cfg, tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch, name):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    write(tmp_path, **{name: b"text"})
    for owner in (Path, gzip):
        monkeypatch.setattr(owner, "open", refuse)
    monkeypatch.setattr(pa, "input_stream", refuse)
    with pytest.raises(DataError, match=f"{name} cannot be read: Permission denied"):
        load_corpus(config("text", name, "decoder_lm"), tmp_path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("*.txt", r"\*\.txt matches no file: put it there"),
        ("a.txt,b.txt", r"does not exist: .*--data DIR; separate values are written \('a\.txt', 'b\.txt'\)$"),
    ],
)
def test_a_file_that_is_not_found(tmp_path, name, sentence):
    with pytest.raises(DataError, match=sentence):
        load_corpus(config("text", name, "decoder_lm"), tmp_path)


def test_a_label_is_text_or_an_integer(tmp_path):
    write(tmp_path, **{"a.jsonl": b'{"label": 1, "text": "a"}\n{"label": 0.5, "text": "b"}\n'})
    write(tmp_path, **{"b.jsonl": b'{"label": true, "text": "a"}\n'})
    for name, place in (("a.jsonl", "line 2: field 'label' is float"), ("b.jsonl", "line 1: field 'label' is bool")):
        with pytest.raises(DataError, match=f"{place}, not text or an integer"):
            load_corpus(config("jsonl", name, "classifier", validation=name), tmp_path)


def test_a_damaged_file_is_not_an_empty_one_too(tmp_path, caplog):
    write(tmp_path, **{"a.zst": zstd(b"a\tb\n" * 9)[:-5], "b.tsv": b"c\td\n", "c.tsv": b""})
    files = ("a.zst", "b.tsv", "c.tsv")
    cfg = config("tsv", "a.zst", validation="b.tsv", on_bad_line="skip")
    corpus = load_corpus(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, train=files)), tmp_path)
    (damaged, count), empty = corpus.left_out["train"].items()
    assert ("is not a complete zstd file" in damaged, count) == (True, 1)
    assert empty == ("the file is empty", 1)
    assert "a.zst: malformed lines skipped: 1, the first at line 1: from here on, this is not a" in caplog.text


@pytest.mark.parametrize("name", [".", "part"])
def test_a_folder_is_not_a_file(tmp_path, name):
    (tmp_path / "part").mkdir()
    cfg = config("text", name, "decoder_lm")
    sentence = f"{tmp_path / name} is a folder: name a file in it, or a glob such as"
    with pytest.raises(DataError, match=sentence):
        load_corpus(cfg, tmp_path)
    assert [sentence in problem for problem in machine_checks.check_data(cfg, tmp_path)] == [True]


def test_an_empty_entry_is_not_a_file(tmp_path):
    with pytest.raises(DataError, match="^an entry of data.train, data.validation or data.test is empty"):
        load_corpus(config("text", "", "decoder_lm"), tmp_path)


def test_other_braces_than_the_language_are_part_of_the_path(tmp_path):
    cfg = config("parallel_lines", "a.{split}.{lang}")
    with pytest.raises(DataError, match=r"a\.{split}\.en does not exist"):
        load_corpus(cfg, tmp_path)
    assert ["a.{split}.en does not exist" in problem for problem in machine_checks.check_data(cfg, tmp_path)] == [True]
    write(tmp_path, **{"a.{split}.en": b"1\n2\n", "a.{split}.de": b"3\n4\n"})
    assert load_corpus(cfg, tmp_path).train == [{"source": "1", "target": "3"}]


def test_unknown_labels(tmp_path):
    write(tmp_path, **{"a.tsv": b"x\t1\ny\t2\n", "b.tsv": b"z\t3\n"})
    with pytest.raises(DataError, match="label 'z' of the held-out data does not occur in the training data, .* x, y"):
        load_corpus(config("tsv", "a.tsv", "classifier", validation="b.tsv"), tmp_path)
    write(tmp_path, **{"a.tsv": "".join(f"{number:03}\ta\n" * 2 for number in range(900)).encode()})
    with pytest.raises(DataError, match="which has 000, 001, .*, 019 and 880 more: add such examples"):
        load_corpus(config("tsv", "a.tsv", "classifier", validation="b.tsv", fields=("2", "1")), tmp_path)


def test_texts_in_the_column_of_labels_are_noticed(tmp_path):
    rows = "".join(f"text {number}\t{number % 2}\n" for number in range(30))
    write(tmp_path, **{"a.tsv": rows.encode()})
    with pytest.raises(DataError, match="has 30 labels in 30 examples, such as 'text 0': say in data.fields"):
        load_corpus(config("tsv", "a.tsv", "classifier", validation="a.tsv"), tmp_path)
    by_name = config("tsv", "a.tsv", "classifier", validation="a.tsv", fields=("1", "2"))
    assert load_corpus(by_name, tmp_path).labels == ("0", "1")
    exchanged = config("tsv", "a.tsv", "classifier", validation="a.tsv", fields=("2", "1"))
    assert len(load_corpus(exchanged, tmp_path).labels) == 30


def test_blank_labels_are_no_classes(tmp_path, caplog):
    """Regression test: they were; and of several rare labels, one was named."""
    write(tmp_path, **{"a.tsv": b"x\t1\nx\t2\n\t3\n \t4\ny\t5\nz\t6\n"})
    corpus = load_corpus(config("tsv", "a.tsv", "classifier", validation="a.tsv"), tmp_path)
    assert corpus.labels == ("x", "y", "z")
    assert corpus.left_out["train"] == {"blank labels": 2}
    assert "2 labels, such as 'y', have only one example in data.train" in caplog.text


def test_a_part_of_a_file_sorted_by_label_is_not_held_out(tmp_path):
    mixed = b"x\t1\ny\t2\n" * 150
    write(tmp_path, **{"a.tsv": mixed, "b.tsv": mixed + b"y\t3\n" * 40})
    assert len(load_corpus(config("tsv", "a.tsv", "classifier"), tmp_path).validation) == 30
    with pytest.raises(DataError, match="the last 34 examples of data.train, .*, all have the label 'y': shuffle"):
        load_corpus(config("tsv", "b.tsv", "classifier"), tmp_path)


def test_no_folder_says_where_the_data_comes_from():
    with pytest.raises(DataError, match=r"reads multi30k/train.en.gz \(it comes from task 1 of .*\) .*--data DIR"):
        load_corpus(config("parallel_lines", "multi30k/train.{lang}.gz"), None)


@pytest.mark.parametrize(
    ("source", "fields", "sentence"),
    [
        ("jsonl", ("text",), r"data.fields=\('text',\): must name 2 fields, for source and target"),
        ("tsv", ("en", "de"), "must be column numbers"),
        ("tsv", ("1",), "must name 2 fields, for source and target"),
    ],
)
def test_fields_that_do_not_fit(tmp_path, source, fields, sentence):
    write(tmp_path, a=b"{}\n")
    with pytest.raises(UserError, match=sentence):
        load_corpus(config(source, "a", fields=fields), tmp_path)


def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.tsv")
    with pytest.raises(DataError, match=r"pipe\.tsv is not a regular file, and it must be read more than once: copy"):
        load_corpus(config("tsv", "pipe.tsv"), tmp_path)
