"""The user cache: values are reused, damaged files are replaced, and failures to write do no harm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import rest_slow
from tformer_jax.base import user_cache
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data.corpora import cldr, load_corpus
from tformer_jax.data.tokenizers.training import train_tokenizers

VALUE = {"a": ["ü", "\ud800"], "b": [1, 2.5, None]}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(user_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def ask(key=None, value=VALUE) -> tuple[object, bool]:
    """Returns the value, and whether it was computed."""
    made = []
    actual = user_cache.cached("topic", key or {"n": 1}, lambda: made.append(1) or value)
    return actual, bool(made)


def test_a_value_is_computed_once_per_key(folder):
    assert ask() == (VALUE, True)
    assert ask() == (VALUE, False)
    assert ask({"n": 2}) == (VALUE, True)
    assert (folder / "topic").stat().st_mode & 0o777 == 0o700


def test_nothing_is_cached_without_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for value in ("", None):
        monkeypatch.setenv(user_cache.VARIABLE, value) if value is not None else monkeypatch.delenv(user_cache.VARIABLE)
        assert ask() == ask() == (VALUE, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "other key", "other JSON", "not UTF-8", "folder"])
def test_a_damaged_or_foreign_file_is_replaced(folder, damage):
    ask()
    (path,) = (folder / "topic").iterdir()
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
        assert ask() == ask() == (VALUE, True)
        return
    changed = {
        "flipped": content.replace(b"2.5", b"2.6"),
        "cut": content[:-1],
        "empty": b"",
        "other key": json.dumps({**json.loads(content), "key": '{"n": 3}'}).encode(),
        "other JSON": b"[]",
        "not UTF-8": content + b"\xff",
    }
    path.write_bytes(changed[damage])
    assert ask() == (VALUE, True)
    assert path.read_bytes() == content
    assert ask() == (VALUE, False)


def test_an_unwritable_folder_is_not_used(folder):
    folder.write_text("a file")
    assert ask() == ask() == (VALUE, True)


def test_the_least_recently_used_files_are_deleted(folder, monkeypatch):
    monkeypatch.setattr(user_cache, "MAX_FILES", 3)
    for n in range(3):
        ask({"n": n})
    for age, path in enumerate(sorted((folder / "topic").iterdir(), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1000 + age, 1000 + age))
    assert not ask({"n": 0})[1]
    ask({"n": 3})
    assert [ask({"n": n})[1] for n in (0, 2, 3)] == [False] * 3
    assert len(list((folder / "topic").iterdir())) == 3
    assert ask({"n": 1})[1]


def test_many_processes_write_the_same_file(folder):
    program = (
        "from tformer_jax.base import user_cache; print(len(user_cache.cached('t', {}, lambda: ['x' * 1000] * 300)))"
    )
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in started] == ["300\n"] * 4
    assert len(list((folder / "t").iterdir())) == 1


def made(seed: int = 0, **data: object) -> tuple[object, ...]:
    """Returns the held-out splits, tokenizers and examples of a CLDR corpus."""
    cldr._book.cache_clear()
    family = "classifier" if data.get("source") == "cldr_language" else "seq2seq"
    settings = DataConfig(heldout_examples=30, tokenizer="bpe", vocab_size=300, tokenizer_examples=200, **data)
    corpus = load_corpus(Config(seed=seed, model=ModelConfig(family=family), data=settings), None)
    tokenizers = train_tokenizers(settings, corpus.train).to_json()
    return corpus.validation, corpus.test, corpus.labels, tokenizers, [corpus.train[i] for i in range(100)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    rest_slow([{}, {"shared_vocab": False}, {"source": "cldr_language", "languages": ("en", "de", "fr")}], 1),
)
def test_cached_cldr_data_is_identical(folder, monkeypatch, data):
    monkeypatch.setenv(user_cache.VARIABLE, "")
    expected = made(**data)
    monkeypatch.setenv(user_cache.VARIABLE, str(folder))
    assert made(**data) == expected
    with monkeypatch.context() as patch:
        patch.setattr("tformer_jax.data.corpora.cldr_phrases.PhraseBook._admit", None)
        patch.setattr("tformer_jax.data.corpora.cldr._held_out", None)
        patch.setattr("tformer_jax.data.tokenizers.training._train_sides", None)
        assert made(**data) == expected
    assert made(seed=1, **data) != expected
