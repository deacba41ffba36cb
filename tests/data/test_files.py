"""Corpora in files: every format is read unchanged."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.data.corpus_files import config, lz4, write, zstd
from tformer_jax.data.corpora import DataError, load_corpus, stream_corpus


def test_parallel_lines_plain_and_compressed(tmp_path):
    (tmp_path / "train.en").write_text("one\r\ntwo\n\nfour\u2028line\n", encoding="utf-8")
    (tmp_path / "train.de").write_text("eins\nzwei\n\nvier", encoding="utf-8")
    write(tmp_path, **{"val.en.gz": gzip.compress(b"five\n"), "val.de.gz": gzip.compress("fünf\n".encode())})
    cfg = config("parallel_lines", "train.{lang}", validation="val.{lang}.gz")
    corpus = load_corpus(cfg, tmp_path)
    assert [(e["source"], e["target"]) for e in corpus.train] == [
        ("one", "eins"),
        ("two", "zwei"),
        ("four\u2028line", "vier"),
    ]
    assert corpus.validation == corpus.test == [{"source": "five", "target": "fünf"}]


def test_globs_stand_for_their_files_in_order(tmp_path):
    (tmp_path / "part").mkdir()
    for number in (2, 0, 1):
        (tmp_path / "part" / f"{number}.en").write_text(f"{number}\n")
        (tmp_path / "part" / f"{number}.de").write_text(f"-{number}\n")
    cfg = config("parallel_lines", "*/*.{lang}", validation="part/0.{lang}")
    assert [example["target"] for example in load_corpus(cfg, tmp_path).train] == ["-0", "-1", "-2"]


def test_hidden_files_are_read_only_by_name(tmp_path):
    """Such as the copies of notebooks in .ipynb_checkpoints; regression test: globs read them, too."""
    for folder in (".ipynb_checkpoints", "x"):
        (tmp_path / folder).mkdir()
    for name in ("a.txt", ".b.txt", ".ipynb_checkpoints/a.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    for glob, names in (
        ("**/*.txt", ["a.txt"]),
        ("*.txt", ["a.txt"]),
        (".*.txt", [".b.txt"]),
        (".b.txt", [".b.txt"]),
        ("x/../*.txt", ["a.txt"]),
    ):
        corpus = load_corpus(config("lines", glob, "decoder_lm", validation="a.txt"), tmp_path)
        assert [example["text"] for example in corpus.train] == names


def test_globs_of_two_languages_are_paired_by_what_the_wildcards_match(tmp_path):
    for name in ("news", "news.commentary", "x[1]"):
        write(tmp_path, **{f"{name}.{lang}": f"{name} {lang}\n".encode() for lang in ("en", "ca", "de")})
    cfg = config("parallel_lines", "*.{lang}", validation="**/x[[]1].{lang}", test="x[1].{lang}", target_language="ca")
    corpus = load_corpus(cfg, tmp_path)
    assert [tuple(pair.values()) for pair in corpus.train] == [
        ("news.commentary en", "news.commentary ca"),
        ("news en", "news ca"),
        ("x[1] en", "x[1] ca"),
    ]
    assert list(corpus.validation) == list(corpus.test) == corpus.train[2:]
    (tmp_path / "news.en").rename(tmp_path / "old.en")
    with pytest.raises(DataError, match=r"news\.ca has no counterpart in 'en': each file that '\*\.{lang}' matches"):
        load_corpus(cfg, tmp_path)


def test_only_the_name_is_a_glob(tmp_path):
    folder = tmp_path / "part [1]"
    folder.mkdir()
    write(folder, **{"a.txt": b"one\ntwo\n"})
    assert len(load_corpus(config("lines", "*.txt", "decoder_lm", validation="a.txt"), folder).train) == 2
    with pytest.raises(DataError, match=r"'\*\*foo' is not a glob: write '\*\*' only as a whole folder, such as"):
        load_corpus(config("lines", "**foo", "decoder_lm"), folder)


def test_tsv_holds_out_its_last_part(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{i}\t-{i}\n" for i in range(10)))
    corpus = load_corpus(config("tsv", "pairs.tsv", validation_fraction=0.2), tmp_path)
    assert [example["source"] for example in corpus.train] == list("01234567")
    assert corpus.validation == [{"source": "8", "target": "-8"}, {"source": "9", "target": "-9"}]


def test_tsv_columns_by_number(tmp_path):
    (tmp_path / "pairs.tsv").write_text("id\tein\tx\tone\nid\tzwei\tx\ttwo\n")
    corpus = load_corpus(config("tsv", "pairs.tsv", fields=("4", "2"), validation="pairs.tsv"), tmp_path)
    assert corpus.train == [{"source": "one", "target": "ein"}, {"source": "two", "target": "zwei"}]


def test_blank_lines_of_tables_are_skipped(tmp_path):
    record = b'{"source": "one", "target": "eins"}'
    write(tmp_path, **{"a.tsv": b"one\teins\n\n", "a.jsonl": b"\n" + record + b"\n \n"})
    for name in ("a.tsv", "a.jsonl"):
        corpus = load_corpus(config(name[2:], name, validation=name), tmp_path)
        assert corpus.train == [{"source": "one", "target": "eins"}]


def test_fields_of_nested_records(tmp_path):
    """As in the translation datasets of the Hugging Face Hub."""
    records = [{"translation": {"en": "one", "de": "eins"}, "a.b": "x"}, {"translation": {"en": "two", "de": "zwei"}}]
    write(tmp_path, **{"a.jsonl": "\n".join(map(json.dumps, records)).encode()})
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.pq")
    for source, name in (("jsonl", "a.jsonl"), ("parquet", "a.pq")):
        cfg = config(source, name, validation=name, fields=("translation.en", "translation.de"))
        assert load_corpus(cfg, tmp_path).train == [
            {"source": "one", "target": "eins"},
            {"source": "two", "target": "zwei"},
        ]
    cfg = config("jsonl", "a.jsonl", validation="a.jsonl", fields=("a.b", "translation.fr"))
    with pytest.raises(DataError, match=r"line 1: has no field 'fr', only 'en', 'de': set data.fields"):
        load_corpus(cfg, tmp_path)
    records[0]["translation"] = None
    write(tmp_path, **{"a.jsonl": "\n".join(map(json.dumps, records)).encode()})
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.pq")
    for source, name in (("jsonl", "a.jsonl"), ("parquet", "a.pq")):
        cfg = config(source, name, validation=name, fields=("translation.en", "translation.de"))
        with pytest.raises(DataError, match="line 1: field 'translation' is null, not an object with the field 'en'"):
            load_corpus(cfg, tmp_path)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    column = pa.array(["x"])
    parquet.write_table(
        pa.Table.from_arrays([column] * 3, names=["source", "source", "target"]), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match="a.parquet names two columns 'source': rename one of them"):
        load_corpus(config("parquet", "a.parquet", validation="a.parquet"), tmp_path)


def test_rows_of_a_missing_column_are_all_counted(tmp_path, caplog):
    parquet.write_table(pa.table({"other": ["x"] * 30}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": ["x"] * 3}), tmp_path / "b.parquet")
    cfg = config("parquet", "*.parquet", "decoder_lm", validation="b.parquet", on_bad_line="skip")
    assert len(load_corpus(cfg, tmp_path).train) == 3
    assert "a.parquet: malformed lines skipped: 30, the first at line 1: has no field 'text'" in caplog.text


def test_a_header_line_is_reported_as_a_label_with_one_example(tmp_path, caplog):
    write(tmp_path, **{"a.tsv": b"label\ttext\n" + b"neg\tbad\npos\tgood\n" * 3, "b.tsv": b"neg\tbad\n"})
    load_corpus(config("tsv", "a.tsv", "classifier", validation="b.tsv"), tmp_path)
    assert "label 'label' has only one example in data.train; if it names a column, set data.header=True" in caplog.text


def test_text_holds_out_its_last_characters(tmp_path):
    (tmp_path / "book.txt").write_text("abcdefghij" * 10)
    corpus = load_corpus(config("text", "book.txt", "decoder_lm"), tmp_path)
    assert [len(split[0]["text"]) for split in (corpus.train, corpus.validation)] == [90, 10]


PACKS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd, ".lz4": lz4}


@pytest.mark.parametrize(("name", "pack"), [(f"a.txt{end}", pack) for end, pack in PACKS.items()])
def test_lines_are_documents(tmp_path, name, pack):
    write(tmp_path, **{name: pack("\ufeffone\n\n  two ü\r\nthree".encode())})
    corpus = load_corpus(config("lines", name, "decoder_lm", validation=name), tmp_path)
    assert [example["text"] for example in corpus.train] == ["one", "  two ü", "three"]


def test_labels_are_those_of_the_training_split(tmp_path):
    (tmp_path / "train.tsv").write_text("pos\tgood\nneg\tbad\n pos \tfine\n")
    (tmp_path / "dev.tsv").write_text("neg\tawful\n")
    corpus = load_corpus(config("tsv", "train.tsv", "classifier", validation="dev.tsv"), tmp_path)
    assert corpus.labels == ("neg", "pos")
    assert corpus.train[0] == {"label": "pos", "text": "good"}


ROWS = [{"en": "one", "de": "eins", "n": 1}, {"en": "two", "de": "zwei", "n": 2}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.stream.arrow"])
def test_records_with_fields(tmp_path, name):
    path, table = tmp_path / name, pa.Table.from_pylist(ROWS)
    if name.endswith("jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif name.endswith("parquet"):
        parquet.write_table(table, path)
    else:
        make = pa.ipc.new_stream if "stream" in name else pa.ipc.new_file
        with make(str(path), table.schema) as file:
            file.write_table(table)
    source = "jsonl" if name.endswith("jsonl") else "parquet"
    cfg = config(source, name, validation=name, fields=("en", "de"))
    assert load_corpus(cfg, tmp_path).train == [{"source": row["en"], "target": row["de"]} for row in ROWS]
    labeled = config(source, name, "classifier", validation=name, fields=("en", "n"))
    assert load_corpus(labeled, tmp_path).train[1] == {"text": "two", "label": "2"}


def test_a_row_without_text_is_named_by_its_number(tmp_path):
    table = pa.table({"source": ["a", "b", None], "target": ["A", "B", "C"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, line 3: field 'source' is null, not text"):
        load_corpus(config("parquet", "a.parquet"), tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_row_that_is_not_utf8_is_named_or_skipped(tmp_path, name):
    raw = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    table = pa.table({"source": raw, "target": ["A", "B", "C"]})
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(str(tmp_path / name), table.schema) as file:
            file.write_table(table)
    with pytest.raises(
        DataError, match=f"{name}, line 2: not valid UTF-8: convert the file to UTF-8; .*data.on_bad_line=.skip. skips"
    ):
        load_corpus(config("parquet", name), tmp_path)
    read = load_corpus(config("parquet", name, validation=name, on_bad_line="skip"), tmp_path).train
    assert [tuple(example.values()) for example in read] == [("a", "A"), ("c", "C")]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_other_columns_are_not_converted(tmp_path, name):
    """Neither nanoseconds nor bytes that are not UTF-8 have a value in Python."""
    others = {
        "when": pa.array([1234567890123456789] * 2, pa.timestamp("ns")),
        "raw": pa.array([b"\xff"] * 2).view(pa.string()),
    }
    table = pa.table({"source": ["a", "b"], "target": ["A", "B"], **others})
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(str(tmp_path / name), table.schema) as file:
            file.write_table(table)
    read = load_corpus(config("parquet", name, validation=name), tmp_path).train
    assert [tuple(example.values()) for example in read] == [("a", "A"), ("b", "B")]
    with pytest.raises(
        DataError, match=rf"{name}, line 1: has no field 'text', only 'source', .*'raw': set data.fields"
    ):
        load_corpus(config("parquet", name, "decoder_lm", validation=name), tmp_path)


def test_empty_files_are_skipped_counted_and_reported(tmp_path, caplog):
    write(tmp_path, **{"a.py": b"x = 1\n", "b.py": b"", "c.py": b" \n", "d.tsv": b"", "e.tsv": b"1\t2\n"})
    cfg = config("text", "*.py", "decoder_lm", validation="a.py", on_bad_line="skip")
    assert load_corpus(cfg, tmp_path).train == [{"text": "x = 1\n"}]
    assert "b.py: malformed lines skipped: 1, the first at line 1: the file is empty" in caplog.text
    pairs = load_corpus(config("tsv", "*.tsv", validation="e.tsv", on_bad_line="skip"), tmp_path).train
    assert pairs == [{"source": "1", "target": "2"}]


def test_a_file_of_two_splits_is_reported(tmp_path, caplog):
    write(tmp_path, **dict.fromkeys(("train.tsv", "dev.tsv", "test.tsv"), b"1\t2\n"))
    load_corpus(config("tsv", "*.tsv", validation="dev.tsv", test="test.tsv"), tmp_path)
    for name, split in (("dev", "validation"), ("test", "test")):
        assert f"{name}.tsv is read for data.train and data.{split}: metrics of the {split} split are" in caplog.text
    caplog.clear()
    load_corpus(config("tsv", "train.tsv", validation="dev.tsv", test="test.tsv"), tmp_path)
    assert not caplog.text


def test_streams_can_be_read_again_and_equal_what_is_loaded(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{i}\t-{i}\n" for i in range(10)))
    cfg = config("tsv", "pairs.tsv")
    streamed, loaded = stream_corpus(cfg, tmp_path), load_corpus(cfg, tmp_path)
    for _ in range(2):
        assert list(streamed.train) == loaded.train
        assert list(streamed.validation) == list(streamed.test) == loaded.validation


def test_a_mixture_keeps_its_parts(tmp_path):
    write(tmp_path, **{"a.tsv": b"1\t2\n", "b.tsv": b"3\t4\n5\t6\n"})
    corpus = load_corpus(config("tsv", ("a.tsv", "b.tsv"), weights=(1, 2), validation="a.tsv"), tmp_path)
    assert corpus.train.sizes == [1, 2]
    assert [example["source"] for example in corpus.train] == ["1", "3", "5"]
