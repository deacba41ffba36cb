"""Corpora in files, and one sentence for each thing that can be wrong with them."""

import gzip

import pytest

from tformer_jax.config import DataConfig
from tformer_jax.data.corpora import DataError, load_corpus


def config(source: str, train: str, **changes) -> DataConfig:
    return DataConfig(source=source, train_file=train, **changes)


def test_parallel_lines_plain_and_compressed(tmp_path):
    (tmp_path / "train.en").write_text("one\r\ntwo\n\nfour\u2028line\n", encoding="utf-8")
    (tmp_path / "train.de").write_text("eins\nzwei\n\nvier", encoding="utf-8")
    with gzip.open(tmp_path / "val.en.gz", "wt", encoding="utf-8") as file:
        file.write("five\n")
    with gzip.open(tmp_path / "val.de.gz", "wt", encoding="utf-8") as file:
        file.write("fünf\n")
    cfg = config("parallel_lines", "train.{lang}", validation_file="val.{lang}.gz")
    corpus = load_corpus(cfg, tmp_path, 0)
    assert [(e["source"], e["target"]) for e in corpus.train] == [
        ("one", "eins"),
        ("two", "zwei"),
        ("", ""),
        ("four\u2028line", "vier"),
    ]
    assert corpus.validation == corpus.test == [{"source": "five", "target": "fünf"}]


def test_tsv_pairs_hold_out_their_last_part(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{i}\t-{i}\n" for i in range(10)))
    corpus = load_corpus(config("tsv_pairs", "pairs.tsv", validation_fraction=0.2), tmp_path, 0)
    assert [example["source"] for example in corpus.train] == list("01234567")
    assert corpus.validation == [{"source": "8", "target": "-8"}, {"source": "9", "target": "-9"}]


def test_text_holds_out_its_last_characters(tmp_path):
    (tmp_path / "book.txt").write_text("abcdefghij" * 10)
    corpus = load_corpus(config("text", "book.txt"), tmp_path, 0)
    assert [len(split[0]["text"]) for split in (corpus.train, corpus.validation)] == [90, 10]


def test_labels_are_those_of_the_training_split(tmp_path):
    (tmp_path / "train.tsv").write_text("pos\tgood\nneg\tbad\n")
    (tmp_path / "dev.tsv").write_text("neg\tawful\n")
    corpus = load_corpus(config("labelled_tsv", "train.tsv", validation_file="dev.tsv"), tmp_path, 0)
    assert corpus.labels == ("neg", "pos")
    assert corpus.train[0] == {"label": "pos", "text": "good"}


def write(folder, **files: bytes) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("cfg", "files", "sentence"),
    [
        (config("text", "a.txt"), {}, r"a\.txt does not exist: put it there, or name another folder with --data DIR"),
        (config("text", "a.txt"), {"a.txt": b""}, r"a\.txt is empty"),
        (config("text", "a.txt"), {"a.txt": b" \n\n"}, r"a\.txt is empty"),
        (config("text", "a.txt"), {"a.txt": b"one\ntwo\n\xff\n"}, r"a\.txt, line 3: not valid UTF-8"),
        (config("text", "a.gz"), {"a.gz": b"plain"}, r"a\.gz is not a complete gzip file"),
        (config("text", "a.gz"), {"a.gz": gzip.compress(b"text" * 99)[:-9]}, r"a\.gz is not a complete gzip file"),
        (
            config("tsv_pairs", "a.tsv"),
            {"a.tsv": b"a\tb\nc\n"},
            r"a\.tsv, line 2: has 1 columns where source<tab>target",
        ),
        (config("tsv_pairs", "a.tsv"), {"a.tsv": b"a\tb\tc\n"}, r"a\.tsv, line 1: has 3 columns"),
        (config("tsv_pairs", "a.tsv"), {"a.tsv": b"a\tb\n"}, r"a\.tsv is too short to hold out"),
        (
            config("parallel_lines", "a.{lang}"),
            {"a.en": b"1\n2\n3\n", "a.de": b"1\n2\n"},
            r"a\.en has 3 lines but .*a\.de has 2: parallel files need equal numbers",
        ),
        (
            config("labelled_tsv", "a.tsv", validation_file="b.tsv"),
            {"a.tsv": b"x\t1\ny\t2\n", "b.tsv": b"z\t3\n"},
            r"label 'z' of the held-out data does not occur in a\.tsv, which has x, y",
        ),
    ],
)
def test_mistakes(tmp_path, cfg, files, sentence):
    write(tmp_path, **files)
    with pytest.raises(DataError, match=sentence) as caught:
        load_corpus(cfg, tmp_path, 0)
    assert "\n" not in str(caught.value)


def test_no_folder_says_where_the_data_comes_from():
    with pytest.raises(DataError, match=r"reads multi30k/train.en.gz \(it comes from task 1 of .*\) .*--data DIR"):
        load_corpus(config("parallel_lines", "multi30k/train.{lang}.gz"), None, 0)
