"""The builder of Debian's descriptions: joins made by hand, splits without common texts, and both layouts of files."""

import gzip
import itertools
import lzma

import pytest

from tests.data.corpus_files import config, lz4
from tests.helpers import rest_slow
from tformer_jax.data.builders.debian_descriptions import read_indexes, stem_of
from tformer_jax.data.corpora import DataError, load_corpus, tfds
from tformer_jax.data.corpora.heldout import split_of

ENGLISH = """Package: libfoo1
Description-md5: 01
Description-en: tool for  foo
 The first paragraph
 has two lines.
 .
 A list:
  * one
  * two
 .
 The end.

Package: bar
Description-md5: 02
Description-en: bar
 Bar is bar.
 .
 Second.

Package: foo-doc
Description-md5: 03
Description-en: tool for foo
"""
GERMAN = """Package: libfoo1
Description-md5: 01
Description-de: Werkzeug für Foo
 Der erste Absatz
 hat zwei Zeilen.
 .
 Eine Liste:
  * eins
 .
 Ende.

Package: bar
Description-md5: 02
Description-de: bar
 Ein Absatz statt zwei.

Package: foo-doc
Description-md5: 03
Description-de: Werkzeug für Foo

Package: gone
Description-md5: 04
Description-de: fehlt
"""


def test_joined_by_hand(tmp_path, caplog):
    (tmp_path / "deb.debian.org_dists_stable_main_i18n_Translation-en.lz4").write_bytes(lz4(ENGLISH.encode()))
    (tmp_path / "Translation-de.xz").write_bytes(lzma.compress(GERMAN.encode()))
    (tmp_path / "Translation-pt_BR").write_text(GERMAN.replace("-de:", "-pt_BR:").replace("Foo", "F."))
    (tmp_path / "deb.debian.org_dists_stable_InRelease").write_text("no index")
    rows = [
        ("tool for foo", "Werkzeug für {}"),
        ("The first paragraph has two lines.", "Der erste Absatz hat zwei Zeilen."),
        ("The end.", "Ende."),
    ]
    expected = [("en", code, en, de.format(foo)) for code, foo in (("de", "Foo"), ("pt_BR", "F.")) for en, de in rows]
    assert list(itertools.chain.from_iterable(read_indexes(tmp_path).values())) == expected
    assert "6 pairs; left out" in caplog.text
    for reason in (
        *("2 lists and examples", "2 duplicates", "2 identical sides", "2 descriptions without English"),
        "2 descriptions with another number of paragraphs",
    ):
        assert reason in caplog.text


def test_stems():
    names = {"libgcc-12-dev": "gcc", "gcc-12": "gcc", "g++": "g", "0ad-data": "0ad", "2048-qt": "2048-qt", "lib": "lib"}
    assert {name: stem_of(name) for name in names} == names


def test_no_english_text_and_no_software_is_in_two_splits(tmp_path):
    names = [f"{first}{second}{end}" for first in "abcdefg" for second in "xyz" for end in ("", "-doc", "-dev")]
    names.sort(key=lambda name: split_of(stem_of(name)))  # neither the first nor the last package is for training
    for language, word in (("en", "of"), ("fr", "de")):
        (tmp_path / f"Translation-{language}").write_text(
            "\n".join(
                f"Package: {name}\nDescription-md5: {name}\nDescription-{language}: {name} {word}\n Common {word}.\n"
                for name in names
            )
        )
    actual = read_indexes(tmp_path)
    splits = {name: {row[2].removesuffix(" of") for row in rows} for name, rows in actual.items()}
    assert all(splits.values())
    assert sum(map(len, splits.values())) == len(names) + 1
    assert "Common of." in splits["train"]
    stems = [set(map(stem_of, texts)) for texts in splits.values()]
    assert not any(first & second for first, second in itertools.combinations(stems, 2))


def test_long_texts_are_left_out(tmp_path):
    for language, letter in (("en", "a"), ("de", "b")):
        texts = f"Description-{language}: {letter * 400}\n {letter * 401}"
        (tmp_path / f"Translation-{language}").write_text(f"Package: a\nDescription-md5: 0\n{texts}\n")
    assert [len(row[3]) for rows in read_indexes(tmp_path).values() for row in rows] == [400]


@pytest.mark.parametrize("layout", rest_slow(["tables", "indexes"], 1))
def test_prepared_by_tfds(layout, tmp_path):
    manual = tmp_path / "manual"
    manual.mkdir()
    if layout == "tables":
        table = "en\tde\tone\teins\nen\tfr\ttwo\tdeux\n"
        (manual / "train.tsv.gz").write_bytes(gzip.compress(table.encode()))
        (manual / "dev.tsv").write_text("en\tde\tthree\tdrei\n")
    else:
        (manual / "Translation-en").write_text(ENGLISH)
        (manual / "Translation-de").write_text(GERMAN)
    languages = {"fields": ("source", "target"), "language_fields": ("source_language", "target_language")}
    cfg = config("tfds", "train", dataset="debian_descriptions", validation="validation", **languages)
    tfds.download(cfg, tmp_path, manual)
    if layout == "indexes":
        assert sum(split.num_examples for split in tfds.find(cfg, tmp_path).info.splits.values()) == 3
        return
    corpus = load_corpus(cfg, tmp_path)
    assert [tuple(example.values()) for example in corpus.train] == [("one", "eins", "en-de"), ("two", "deux", "en-fr")]
    assert [*corpus.validation] == [{"source": "three", "target": "drei", "direction": "en-de"}]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, r"no Translation-\* file of English\. Name a folder with apt's Translation-\* files"),
        ({"Translation-en": ENGLISH}, r"no Translation-\* file of another language"),
        ({"dev.tsv": "en\tde\ta\n"}, "dev.tsv, line 1: has 3 columns where 4 are expected"),
        ({"Translation-en.gz": "no gzip"}, r"Translation-en.gz, line 1: from here on, this is not a complete gzip"),
    ],
)
def test_mistakes(files, sentence, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=sentence):
        tfds.download(config("tfds", "train", dataset="debian_descriptions"), tmp_path / "data", tmp_path)
