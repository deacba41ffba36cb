"""Examples of large files, which are stored and memory-mapped, are those that are read into memory."""

import logging
import os
import pickle
import time

import pytest

from tformer_jax.base.user_cache import VARIABLE
from tformer_jax.config import Config, DataConfig, ModelConfig, kinds
from tformer_jax.config.examples import FilterConfig
from tformer_jax.data.corpora import DataError, blocks, load_corpus, stored
from tformer_jax.data.corpora.files import FileSource

FILES = {
    "pairs.tsv": "".join(f"a {n}\tb {n}\n" for n in range(40)) + "no tab\nc\t\n\nd\td\n\N{SNOWMAN}\t\r\n",
    "more.tsv": "x\ty\nx\ty\nz\tz\n",
    "dev.tsv": "e\tf\n",
    "text.en": "one\ntwo\nthree\n",
    "text.de": "eins\nzwei\ndrei\n",
    "languages.tsv": "en\tde\ta\tb\nde\tfr\tc\td\nen\tde\te\tf\nen\tfr\tg\th\n",
    "labels.jsonl": "".join(f'{{"text": "t{n}", "label": {n % 3}}}\n' for n in range(30)),
}
FEW = ("pairs.tsv", "more.tsv")
CASES = {
    "pairs": DataConfig(source="tsv", train=("pairs.tsv",), validation=("dev.tsv",), on_bad_line="skip"),
    "filters": DataConfig(
        source="tsv",
        train=("*s.tsv", "more.tsv"),
        validation=("dev.tsv",),
        test=("more.tsv",),
        on_bad_line="skip",
        filters=FilterConfig(duplicates=True, identical_sides=True),
    ),
    "held-out": DataConfig(source="tsv", train=("more.tsv",), validation_fraction=0.4),
    "files by language": DataConfig(source="parallel_lines", train=("text.{lang}",), validation=("text.{lang}",)),
    "mixture": DataConfig(source="tsv", train=FEW, weights=(1.0, 2.0), validation=("dev.tsv",), on_bad_line="skip"),
    "languages": DataConfig(
        source="tsv",
        train=("languages.tsv",),
        validation=("languages.tsv",),
        directions=("en-de", "fr-en"),
        fields=("3", "4"),
        language_fields=("1", "2"),
    ),
    "labels": DataConfig(source="jsonl", train=("labels.jsonl",)),
}


def load(name, root):
    cfg = Config(data=CASES[name])
    if name == "labels":
        cfg = Config(data=CASES[name], model=ModelConfig(family="classifier"))
    return load_corpus(cfg, root)


def contents(corpus):
    splits = [list(split) for split in (corpus.train, corpus.validation, corpus.test)]
    keys = [list(example) for split in splits for example in split]
    return splits, keys, corpus.sizes, corpus.labels, corpus.directions, corpus.left_out


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for name, text in FILES.items():
        (tmp_path / "data" / name).write_text(text, encoding="utf-8", newline="")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "data"


@pytest.mark.parametrize("name", CASES)
def test_stored_examples_and_counts_are_those_in_memory(name, root, monkeypatch, caplog):
    wanted, warnings = contents(load(name, root)), caplog.messages[:]
    monkeypatch.setattr(stored, "LARGE", 1)
    monkeypatch.setattr(stored, "ROWS", 7)
    first = load(name, root)
    assert contents(first) == wanted
    monkeypatch.setattr(stored, "_store", None)  # the second time, nothing is read or written
    caplog.clear()
    again = load(name, root)
    assert contents(again) == wanted
    assert caplog.messages == warnings
    copy = pickle.loads(pickle.dumps(again.train))
    assert [copy[index] for index in range(-len(copy), 0)] == wanted[0][0]
    assert len(pickle.dumps(again.train)) < 2000


def test_changed_files_and_settings_are_read_again(root, monkeypatch, caplog):
    monkeypatch.setattr(stored, "LARGE", 1)
    before = load("pairs", root).train
    (root / "pairs.tsv").write_text("new\tpair\n", encoding="utf-8")
    assert list(load("pairs", root).train) == [{"source": "new", "target": "pair"}]
    assert before[0] == {"source": "a 0", "target": "b 0"}
    (root / "pairs.tsv").write_text("abc\tpair\n", encoding="utf-8")
    os.utime(root / "pairs.tsv", ns=(0, 0))
    assert list(load("pairs", root).train) == [{"source": "abc", "target": "pair"}]
    (folder, *_) = {path.parent for path in root.parent.glob("cache/examples/*/examples.arrow")}
    assert any(folder.name in message for message in caplog.messages)


def test_a_damaged_file_is_written_again(root, monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 1)
    wanted = contents(load("pairs", root))
    for path in root.parent.glob("cache/examples/*/examples.arrow"):
        path.write_bytes(path.read_bytes()[:100])
    assert contents(load("pairs", root)) == wanted
    monkeypatch.setattr(stored, "_store", None)
    assert contents(load("pairs", root)) == wanted


def test_least_recently_used_folders_are_removed(root, monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 1)
    monkeypatch.setattr(stored, "MAX_FOLDERS", 2)
    cache = root.parent / "cache" / "examples"
    for name in ("pairs", "files by language", "held-out"):
        load(name, root)
    used = len(list(cache.glob("*")))
    assert used > 2  # regression test: a run with many entries removed its own
    for folder in cache.glob("*"):
        os.utime(folder, (0, 0))
    load("languages", root)
    assert len(list(cache.glob("*"))) == 2


def test_without_a_place_examples_are_held_in_memory(root, monkeypatch, caplog):
    monkeypatch.setattr(stored, "LARGE", 1)
    (root.parent / "cache").write_text("a file where the folder should be", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert isinstance(load("files by language", root).train, list)
    assert "the examples are held in memory" in caplog.text
    monkeypatch.delenv(VARIABLE)
    assert isinstance(load("files by language", root).train, list)


def test_examples_of_other_code_are_not_stored(root, monkeypatch):
    """Regression test: they were those of its code before a module that it calls was changed."""

    class Own(FileSource):
        examples, entry = None, "'a.txt'"

        def read_file(self, path):
            yield {"source": changed["text"], "target": "b"}

    monkeypatch.setitem(kinds.CORPORA, "own", Own)
    monkeypatch.setattr(stored, "LARGE", 1)
    cfg = Config(data=DataConfig(source="own", train=("text.en",), validation=("text.en",)))
    for text in ("first", "second"):
        changed = {"text": text}
        assert load_corpus(cfg, root).train == [{"source": text, "target": "b"}]


def stored_files(root):
    return sorted(root.parent.glob("cache/examples/*/examples.arrow"))


def test_batches_end_by_size(root, monkeypatch):
    """Regression test: 16,384 long texts, or the lines of a block, were held at once."""
    monkeypatch.setattr(stored, "LARGE", 1)
    monkeypatch.setattr(stored, "BYTES", 100)
    monkeypatch.setattr(blocks, "BYTES", 100)
    text = "".join(f"{'a' * (40 + n)}\t{'b' * n}c\n" for n in range(30))
    (root / "pairs.tsv").write_text(text, encoding="utf-8")
    train = load("pairs", root).train
    sizes = train._batches.sizes
    assert sum(sizes) == 30
    assert max(sizes) <= 3
    assert "".join(f"{pair['source']}\t{pair['target']}\n" for pair in train) == text
    assert [train[index] for index in range(30)] == list(train)


def test_files_that_change_while_they_are_read_are_not_stored(root, monkeypatch):
    """Regression test: the new examples were stored as those of the file before."""
    monkeypatch.setattr(stored, "LARGE", 1)
    write = stored._write

    def write_and_change(path, examples):
        os.utime(root / "pairs.tsv", ns=(0, 0))
        return write(path, examples)

    monkeypatch.setattr(stored, "_write", write_and_change)
    with pytest.raises(DataError, match=r"pairs\.tsv changed while it was read: start again"):
        load("pairs", root)
    assert not stored_files(root)


def test_what_a_killed_process_left_is_removed_after_a_day(root, monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 1)
    cache = root.parent / "cache" / "examples"
    for name, age in (("new-a", 25 * 3600), ("new-b", 3600)):
        (cache / name / "half").mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    load("pairs", root)
    assert [path.name for path in sorted(cache.glob("new-*"))] == ["new-b"]


def test_examples_that_are_read_stay_in_use(root, monkeypatch):
    """Regression test: those of a run of more than a day were removed, and its later loader processes failed."""
    monkeypatch.setattr(stored, "LARGE", 1)
    monkeypatch.setattr(stored, "MAPPED_READS", 5)
    train = load("pairs", root).train
    (folder,) = {path.parent for path in stored_files(root) if path.parent.name == train.origin()}
    os.utime(folder, (0, 0))
    assert [train[index] for index in range(4)]
    assert folder.stat().st_mtime == 0
    assert train[4]
    assert folder.stat().st_mtime > time.time() - 60
