"""Prepared data that is damaged, or does not fit a config or a run, is refused with a reason."""

import dataclasses
import itertools
import types

import pytest

from tests.data.prepared import config, prepared
from tformer_jax.base.errors import UserError
from tformer_jax.cli import evaluate
from tformer_jax.config import FilterConfig
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.pipeline import check_predictable, evaluation_batches, train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer


def damage(path) -> None:
    raw = bytearray(path.read_bytes())
    raw[1000:1200] = bytes(200)
    path.write_bytes(raw)


MISTAKES = {
    "no dataset.json": (lambda p: (p / "dataset.json").unlink(), "is not the output of scripts/prepare_data.py"),
    "a damaged dataset.json": (lambda p: (p / "dataset.json").write_text("{"), "dataset.json is damaged"),
    "another dataset.json": (
        lambda p: (p / "dataset.json").write_text("[]"),
        "was not written by scripts",
    ),
    "no family": (lambda p: (p / "dataset.json").write_text('{"format": 2}'), "is damaged: it has no 'data'"),
    "another format": (lambda p: (p / "dataset.json").write_text('{"format": 0}'), "has format 0, not 2"),
    "a lost shard": (lambda p: next(p.glob("train*")).unlink(), "does not exist: prepare the data again"),
    "a cut shard": (
        lambda p: (f := next(p.glob("train*"))).write_bytes(f.read_bytes()[:100]),
        "has 0 records instead of 81",
    ),
    "a changed length": (lambda p: (p / "train.lengths").write_bytes(b"\2" * 4 * 81 * 2), "train.lengths is not the"),
    "another tokenizer": (
        lambda p: next((p / "tokenizers").iterdir()).write_text("{}"),
        r"tokenizers/.*\.json is not the file that was prepared: restore it, or prepare the data again",
    ),
    "a lost tokenizer": (lambda p: next((p / "tokenizers").iterdir()).unlink(), "does not exist: prepare the data"),
    "an overwritten shard": (lambda p: damage(next(p.glob("train*"))), "is damaged"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_damaged_folders(mistake, corpus_folder, tmp_path):
    cfg = config("seq2seq")
    prepare(cfg, corpus_folder, tmp_path / "p")
    spoil, sentence = MISTAKES[mistake]
    spoil(tmp_path / "p")
    with pytest.raises(DataError, match=sentence) as caught:
        list(load_corpus(prepared(cfg, tmp_path / "p"), None).train)
    assert "\n" not in str(caught.value)


CUTS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "cut within an id": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", ["decoder_lm", "decoder_lm packed"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_damaged_token_stream(kind, cut, corpus_folder, tmp_path):
    cfg = config(kind)
    prepare(cfg, corpus_folder, tmp_path / "p")
    CUTS[cut](tmp_path / "p" / "train.tokens")
    cfg = prepared(cfg, tmp_path / "p")
    problem = "does not exist" if cut == "missing" else "is missing or of another size"
    with pytest.raises(DataError, match=rf"train\.tokens {problem}: prepare the data again"):
        corpus = load_corpus(cfg, None)
        list(itertools.islice(train_batches(cfg, corpus, Tokenizers.load(corpus.tokenizers)), 3))


def test_a_split_of_one_empty_document(tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 9)
    data = {"source": "jsonl", "train": "train.jsonl", "validation": "empty.jsonl"}
    with pytest.raises(DataError, match="split validation has no valid example; dropped: 1 blank texts"):
        prepare(config("decoder_lm", **data), tmp_path, tmp_path / "p")
    cfg = config("decoder_lm", **data, filters=FilterConfig(blank_sides=False))
    prepare(cfg, tmp_path, tmp_path / "p")
    cfg = prepared(cfg, tmp_path / "p")
    corpus = load_corpus(cfg, None)
    tokenizers = Tokenizers.load(corpus.tokenizers)
    assert list(evaluation_batches(cfg, corpus.validation, tokenizers)) == []
    with pytest.raises(DataError, match="needs at least 2 tokens, and split validation has"):
        check_predictable(cfg, corpus, tokenizers)


@pytest.mark.parametrize("kind", ["decoder_lm", "decoder_lm packed"])
def test_ids_outside_the_vocabulary(kind, corpus_folder, tmp_path):
    cfg = config(kind)
    prepare(cfg, corpus_folder, tmp_path / "p")
    stream = tmp_path / "p" / "train.tokens"
    stream.write_bytes(b"\xff" * stream.stat().st_size)
    cfg = prepared(cfg, tmp_path / "p")
    corpus = load_corpus(cfg, None)
    tokenizers = Tokenizers.load(corpus.tokenizers)
    sentence = f"token id 65535, but the vocabulary has only {tokenizers.target.vocab_size} tokens"
    with pytest.raises(DataError, match=sentence):
        next(train_batches(cfg, corpus, tokenizers))
    if kind == "decoder_lm":
        with pytest.raises(DataError, match=sentence):
            next(evaluation_batches(cfg, corpus.train, tokenizers))


def test_folders_that_do_not_fit(corpus_folder, tmp_path):
    prepare(config("seq2seq"), corpus_folder, tmp_path / "a")
    prepare(config("seq2seq"), corpus_folder, tmp_path / "b", tokenizers=Tokenizers(*[ByteTokenizer()] * 2))
    with pytest.raises(DataError, match="b differs from .*a in its tokenizers or labels: prepare both with the same"):
        load_corpus(prepared(config("seq2seq"), tmp_path / "a", tmp_path / "b"), None)
    with pytest.raises(DataError, match="was prepared for model.family='seq2seq', not 'classifier'"):
        load_corpus(prepared(config("classifier"), tmp_path / "a"), None)
    file = corpus_folder / "seq2seq.tsv"
    with pytest.raises(DataError, match="seq2seq.tsv is a file: name the folder"):
        load_corpus(prepared(config("seq2seq"), file), None)


OTHERS = [("target_language", "fr"), ("normalize", ("lowercase",)), ("tokenizer", "bytes"), ("vocab_size", 9)]
OTHERS += [("symbols", ("<b>",)), ("placeholders", ("tags",))]


@pytest.mark.parametrize(("name", "value"), OTHERS)
def test_data_of_other_languages_texts_or_tokenizers_are_refused(name, value, corpus_folder, tmp_path):
    cfg = config("seq2seq", source_language="en", target_language="de")
    prepare(cfg, corpus_folder, tmp_path / "p")
    load_corpus(prepared(cfg, tmp_path / "p"), None)
    other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **{name: value}))
    with pytest.raises(DataError, match=rf"was prepared with data\.{name}=.*: write "):
        load_corpus(prepared(other, tmp_path / "p"), None)


IGNORED = [("validation", "other.tsv"), ("test", "other.tsv"), ("fields", ("2", "1")), ("validation_fraction", 0.5)]


@pytest.mark.parametrize(("name", "value"), IGNORED)
def test_settings_whose_effect_is_stored_are_refused_if_they_differ(name, value, corpus_folder, tmp_path):
    cfg = config("seq2seq")
    prepare(cfg, corpus_folder, tmp_path / "p")
    other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **{name: value}))
    with pytest.raises(UserError, match=rf"data\.{name}=.*: is not read, because .*: leave it out, or prepare"):
        load_corpus(prepared(other, tmp_path / "p"), None)
    prepare(other, with_file(corpus_folder, "other.tsv"), tmp_path / "p")
    load_corpus(prepared(other, tmp_path / "p"), None)
    load_corpus(prepared(cfg, tmp_path / "p"), None)


def with_file(folder, name):
    (folder / name).write_text("one\teins\n")
    return folder


def test_settings_of_tokenizers_do_not_matter_for_data_of_given_ones(corpus_folder, tmp_path):
    given = Tokenizers(*[ByteTokenizer()] * 2)
    prepare(config("seq2seq"), corpus_folder, tmp_path / "p", tokenizers=given)
    load_corpus(prepared(config("seq2seq", tokenizer="words", vocab_size=9), tmp_path / "p"), None)


def test_a_run_is_not_evaluated_with_other_classes(corpus_folder, tmp_path):
    cfg = config("classifier")
    prepare(cfg, corpus_folder, tmp_path / "p")
    run = types.SimpleNamespace(path=tmp_path / "run", labels=("only",))
    with pytest.raises(UserError, match="but .*run has the classes only; restore the training data"):
        evaluate.evaluate_split(run, prepared(cfg, tmp_path / "p"), "test", None)


def test_a_run_is_not_evaluated_on_the_ids_of_other_tokenizers(corpus_folder, tmp_path):
    cfg = config("seq2seq")
    prepare(cfg, corpus_folder, tmp_path / "p")
    Tokenizers(*[ByteTokenizer()] * 2).save(tmp_path / "run" / "tokenizers")
    run = types.SimpleNamespace(path=tmp_path / "run", labels=None)
    with pytest.raises(UserError, match="p/tokenizers are not the tokenizers that .*run/tokenizers was trained with"):
        evaluate.evaluate_split(run, prepared(cfg, tmp_path / "p"), "test", None)
