"""Prepared data gives the same batches as its corpus."""

import base64
import collections
import dataclasses
import itertools
import json
import pickle

import numpy as np
import pytest

from tests.data.prepared import KINDS, OBJECTIVES, WORDS, config, prepared
from tests.data.test_pipeline import assert_restored_exactly, assert_same, assert_shards_of
from tests.helpers import rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.cli import prepare_data
from tformer_jax.config import Config, DataConfig, TrainConfig
from tformer_jax.data.corpora import Corpus, DataError, load_corpus
from tformer_jax.data.corpora.array_records import Records, decode_ids, decode_texts, encode_record, id_dtype
from tformer_jax.data.corpora.corpus import spread
from tformer_jax.data.features import Tokenized
from tformer_jax.data.objectives import build_objective
from tformer_jax.data.objectives.windows import CorruptedWindows
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.prepare import _digest, prepare
from tformer_jax.data.rows import ORDER, Shards, token_stream
from tformer_jax.data.tokenizers import Tokenizers, from_json
from tformer_jax.data.tokenizers.base import SENTINEL_TOKENS
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.data.windows import Windows
from tformer_jax.special_tokens import PAD


def ready(cfg: Config, corpus_folder, folder) -> tuple[Config, Corpus, Tokenizers]:
    """Prepares a corpus in `folder`, and returns what `train_batches` needs to read it."""
    prepare(cfg, corpus_folder, folder)
    cfg = prepared(cfg, folder)
    corpus = load_corpus(cfg, None)
    return cfg, corpus, Tokenizers.load(corpus.tokenizers)


def test_equal_tokenizers_have_one_digest():
    """The order of the lines of a tiktoken file does not matter."""
    ranks = [(base64.b64encode(bytes([byte])).decode(), byte) for byte in range(256)]
    actual = set()
    for order in (ranks, ranks[::-1]):
        tokenizer = from_json({"kind": "tiktoken", "ranks": dict(order)})
        actual.add(_digest(Tokenizers(tokenizer, tokenizer)))
    assert len(actual) == 1


@pytest.mark.parametrize("kind", [*KINDS, *OBJECTIVES])
def test_batches_are_those_of_the_corpus_itself(kind, corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tformer_jax.data.prepare.EXAMPLES_PER_CHUNK", 16)  # so that this small split has several files
    cfg = config(kind)
    summaries = prepare(cfg, corpus_folder, tmp_path / "p", shards=3)
    assert len(summaries["train"].files) == 3
    assert summaries["train"].examples == 81
    corpus, again = load_corpus(cfg, corpus_folder), load_corpus(prepared(cfg, tmp_path / "p"), None)
    assert again.labels == corpus.labels
    assert list(again.train) == list(corpus.train)
    tokenizers = Tokenizers.load(again.tokenizers)
    assert tokenizers.to_json() == train_tokenizers(cfg.data, corpus.train).to_json()
    expected, actual = (train_batches(cfg, c, tokenizers) for c in (corpus, again))
    assert_same(list(itertools.islice(actual, 30)), list(itertools.islice(expected, 30)))
    expected, actual = (evaluation_batches(cfg, c.test, tokenizers, c.labels) for c in (corpus, again))
    assert_same(list(actual), list(expected))


@pytest.mark.parametrize("kind", [*KINDS, *OBJECTIVES])
def test_a_limited_evaluation_reads_the_stored_ids(kind, corpus_folder, tmp_path, monkeypatch):
    cfg = config(kind)
    prepare(cfg, corpus_folder, tmp_path / "p")
    corpus = load_corpus(cfg, corpus_folder)
    tokenizers = Tokenizers.load(tmp_path / "p" / "tokenizers")
    other = config(kind, validation_fraction=0.2)
    prepare(other, corpus_folder, tmp_path / "q", tokenizers=tokenizers)
    held_out = {"p": corpus.test, "q": load_corpus(other, corpus_folder).test}
    folders, expected = {5: ["p"], 12: ["p", "q"]}, {}
    for limit, names in folders.items():
        whole = [example for name in names for example in held_out[name]]
        texts = [whole[number * len(whole) // limit] for number in range(limit)]  # evenly spread
        expected[limit] = list(evaluation_batches(cfg, texts, tokenizers, corpus.labels))
    monkeypatch.delattr(Tokenized, "read")
    for limit, names in folders.items():
        actual = load_corpus(prepared(cfg, *(tmp_path / name for name in names)), None).test
        batches = list(evaluation_batches(cfg, actual, tokenizers, corpus.labels, indices=spread(len(actual), limit)))
        assert len(batches) == len(expected[limit])
        assert_same(batches, expected[limit])


@pytest.mark.parametrize("kind", ["decoder_lm", "masked_lm"])
def test_loader_processes_map_the_tokens_instead_of_copying_them(kind, corpus_folder, tmp_path):
    cfg, corpus, tokenizers = ready(config(kind), corpus_folder, tmp_path / "p")
    stream = token_stream(corpus.train)
    windows = (
        Windows(stream, 9)
        if kind == "decoder_lm"
        else CorruptedWindows([stream], build_objective(cfg.data, tokenizers.target), 0)
    )
    windows.batch([0])
    pickled = pickle.dumps(windows)
    assert stream[:].tobytes() not in pickled
    assert_same([pickle.loads(pickled).batch([3, 5])], [windows.batch([3, 5])])


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_loader_processes_corrupt_as_the_main_process_does(kind, corpus_folder, tmp_path):
    cfg, corpus, tokenizers = ready(config(kind), corpus_folder, tmp_path / "p")
    expected = list(itertools.islice(train_batches(cfg, corpus, tokenizers), 12))
    parallel = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, workers=2))
    actual = train_batches(parallel, corpus, tokenizers)
    assert_same(list(itertools.islice(actual, 12)), expected)
    actual.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", rest_slow([*OBJECTIVES, *reversed(KINDS)], len(OBJECTIVES) + 2))
def test_restored_exactly(kind, corpus_folder, tmp_path):
    assert_restored_exactly(ready(config(kind), corpus_folder, tmp_path / "p"), batches=20, points=20)


LONG_DOCUMENTS = {f"{kind}-{action}": (kind, action) for action in ("split", "truncate") for kind in reversed(KINDS)}


@pytest.mark.parametrize("case", rest_slow(LONG_DOCUMENTS, len(KINDS) - 1))
def test_a_process_reads_its_own_rows_only(case, corpus_folder, tmp_path, monkeypatch):
    """Two processes prepare the batches of one, and read as many ids together: each record is read by one of them."""
    kind, long_documents = case
    sizes = {"batch_multiple": 4} if "bucket_lengths" in KINDS[kind][1] else {"batch_size": 4}
    cfg = config(kind, **sizes, long_documents=long_documents)
    prepare(cfg, corpus_folder, tmp_path / "p")
    corpus = load_corpus(prepared(cfg, tmp_path / "p"), None)
    arguments = cfg, corpus, Tokenizers.load(corpus.tokenizers)
    batches = train_batches(*arguments)
    assert_shards_of(arguments, list(itertools.islice(batches, 12)))
    batches.close()
    read = counted_ids(monkeypatch)
    for own in ((0, 1, 2, 3), (0, 3), (1, 2)):
        read.owner = own
        batches = train_batches(*arguments, shards=Shards(4, own))._loader  # without the thread that runs ahead
        for _ in range(6):
            next(batches)
    windows = cfg.data.batching == "windows"  # are read from the stream, which is mapped into memory
    assert (read[0, 3] + read[1, 2] == read[0, 1, 2, 3]) and (windows or min(read.values()) > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_evaluates_its_own_rows_only(kind, corpus_folder, tmp_path, monkeypatch):
    """Four processes prepare the batches of one, and together read each record once."""
    cfg = config(kind)
    prepare(cfg, corpus_folder, tmp_path / "p")
    corpus = load_corpus(prepared(cfg, tmp_path / "p"), None)
    tokenizers, read, actual = Tokenizers.load(corpus.tokenizers), counted_ids(monkeypatch), {}
    for own in ((0, 1, 2, 3), (0,), (1,), (2,), (3,)):
        read.owner = own
        batches = evaluation_batches(cfg, corpus.test, tokenizers, corpus.labels, shards=Shards(4, own))
        actual[own] = list(batches)
    for number, batch in enumerate(actual.pop((0, 1, 2, 3))):
        for key, rows in batch.items():
            parts = [actual[own][number][key] for own in sorted(actual)]
            np.testing.assert_array_equal(parts[0] if key == ORDER else np.concatenate(parts), rows)
    assert sum(read[own] for own in actual) == read[0, 1, 2, 3]


class Counts(collections.Counter):
    """Numbers by owner."""

    owner: tuple[int, ...] = ()


def counted_ids(monkeypatch) -> Counts:
    """Counts the ids that are read from records, by the current `owner`."""
    counts = Counts()

    def count(name):
        original = getattr(Records, name)

        def counted(self, *given):
            actual = original(self, *given)
            ids = sum(column.lengths.sum() for column in actual.values()) if name == "read" else len(actual) - 1
            counts[counts.owner] += int(ids)
            return actual

        monkeypatch.setattr(Records, name, counted)

    count("read")
    count("span")
    return counts


@pytest.mark.parametrize("kind", ["seq2seq", "decoder_lm", "decoder_lm packed"])
def test_a_mixture_of_folders(kind, corpus_folder, tmp_path):
    cfg = config(kind, weights=())
    for name in "ab":
        prepare(cfg, corpus_folder, tmp_path / name)
    cfg = prepared(cfg, tmp_path / "a", tmp_path / "b")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, weights=(1, 3)))
    corpus = load_corpus(cfg, None)
    assert corpus.train.sizes == [81, 81]
    assert_restored_exactly((cfg, corpus, Tokenizers.load(corpus.tokenizers)), batches=20, points=5)


def test_bpe_dropout_reads_the_texts(corpus_folder, tmp_path):
    cfg = config("seq2seq", tokenizer="bpe", vocab_size=300)
    prepare(cfg, corpus_folder, tmp_path / "p")
    cfg = prepared(cfg, tmp_path / "p")
    cfg = dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, transforms=({"kind": "bpe_dropout", "rate": 1.0},))
    )
    corpus = load_corpus(cfg, None)
    tokenizers = Tokenizers.load(corpus.tokenizers)
    batch = next(train_batches(cfg, corpus, tokenizers))
    row = batch["source"][0]
    text = tokenizers.source.decode(row)
    assert text in WORDS
    assert (row != PAD).sum() == len(text.encode()) + 1, "with every merge left out, a token is a byte"


def test_bpe_dropout_is_refused_if_the_prepared_tokenizers_are_no_bpe(corpus_folder, tmp_path):
    prepare(config("seq2seq"), corpus_folder, tmp_path / "p", tokenizers=Tokenizers(*[ByteTokenizer()] * 2))
    cfg = prepared(config("seq2seq", tokenizer="bpe", transforms=("bpe_dropout",)), tmp_path / "p")
    corpus = load_corpus(cfg, None)
    with pytest.raises(UserError, match="bpe_dropout: needs a BPE tokenizer, which the data does not"):
        train_batches(cfg, corpus, Tokenizers.load(corpus.tokenizers))


def test_the_summary_counts(corpus_folder, tmp_path, capsys):
    (tmp_path / "a.tsv").write_bytes(b"aaa\tbbbbb\nalone\nc\td\n\xff\tx\n \ty\n")
    cfg = config("seq2seq", train="a.tsv", validation="a.tsv", on_bad_line="skip")
    summary = prepare(cfg, tmp_path, tmp_path / "p")["train"]
    assert (summary.examples, summary.tokens, summary.lengths) == (2, {"source": 4, "target": 6}, {8: 1, 1: 1})
    assert (sorted(summary.skipped.values()), summary.skipped["blank texts"]) == ([1, 1, 1], 1)
    prepared = config("seq2seq", source="prepared", train="p")
    assert load_corpus(prepared, tmp_path).left_out["train"] == summary.skipped
    facts = json.loads((tmp_path / "p" / "dataset.json").read_text())
    assert facts["splits"]["train"]["examples"] == 2
    from rich.console import Console

    Console(width=200).print(prepare_data.summary_table(tmp_path / "p", {"train": summary}))
    shown = capsys.readouterr().out
    assert "1: not valid UTF-8" in shown
    assert "up to 8: 1" in shown


@pytest.mark.parametrize(
    ("files", "skipped"),
    [
        ({"train": "a.tsv"}, [2, 0, 0]),
        ({"train": "a.tsv", "validation": "b.tsv"}, [2, 1, 0]),
        ({"train": "b.tsv", "validation": "b.tsv", "test": "a.tsv"}, [1, 1, 2]),
    ],
)
def test_skipped_lines_count_for_the_split_that_names_their_file(files, skipped, tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"aaa\tbbbbb\nalone\nc\td\n\xff\tx\n")
    (tmp_path / "b.tsv").write_bytes(b"a\tb\nalone\n")
    held_out = {} if "validation" in files else {"validation_fraction": 0.5}
    cfg = config("seq2seq", on_bad_line="skip", **held_out, **files)
    summaries = prepare(cfg, tmp_path, tmp_path / "p")
    assert [sum(summary.skipped.values()) for summary in summaries.values()] == skipped


def test_nothing_is_left_when_preparing_fails(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"a\tb\n" * 30 + b"alone\n")
    (tmp_path / "b.tsv").write_bytes(b"a\tb\n")
    with pytest.raises(DataError, match=r"a\.tsv, line 31"):
        prepare(config("seq2seq", train="b.tsv", validation="a.tsv"), tmp_path, tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "b.tsv"]


@pytest.mark.parametrize("vocab_size", [300, 70_000])
def test_records_by_hand(vocab_size):
    dtype = id_dtype(vocab_size)
    assert dtype.itemsize == (2 if vocab_size == 300 else 4)
    ids = [np.array([5, vocab_size - 1]), np.array([], int), np.array([7])]
    record = encode_record(["ä", "", "\ud800"], ids, dtype)
    other = encode_record(["", "", ""], [np.array([1]), np.array([2, 3]), np.array([], int)], dtype)
    columns = [column.rows() for column in decode_ids([record, other], 3, dtype)]
    for column, first, second in zip(columns, ids, ([1], [2, 3], []), strict=True):
        np.testing.assert_array_equal(column[0], first)
        np.testing.assert_array_equal(column[1], second)
    assert decode_texts(record, 3, dtype) == ["ä", "", "\ud800"]


@pytest.mark.parametrize("kind", ["seq2seq", "seq2seq spans"])
def test_given_tokenizers_fit_the_data(kind, corpus_folder, tmp_path):
    cfg, given = config(kind), Tokenizers(*[ByteTokenizer()] * 2)
    prepare(cfg, corpus_folder, tmp_path / "p", tokenizers=given)
    corpus = load_corpus(prepared(cfg, tmp_path / "p"), None)
    train_batches(prepared(cfg, tmp_path / "p"), corpus, Tokenizers.load(corpus.tokenizers)).close()
    with pytest.raises(UserError, match=r"data.normalize=\('lowercase',\): must be \(\), as in the given tokenizers"):
        prepare(config(kind, normalize=("lowercase",)), corpus_folder, tmp_path / "q", tokenizers=given)


def test_tokenizers_of_one_objective_prepare_another(corpus_folder, tmp_path):
    masked, spans = config("masked_lm"), config("seq2seq spans")
    given = train_tokenizers(masked.data, load_corpus(masked, corpus_folder).train)
    prepare(spans, corpus_folder, tmp_path / "p", tokenizers=given)
    corpus = load_corpus(prepared(spans, tmp_path / "p"), None)
    actual = Tokenizers.load(corpus.tokenizers)
    train_batches(prepared(spans, tmp_path / "p"), corpus, actual).close()
    assert actual.target.extension == ("<mask>", *SENTINEL_TOKENS)


@pytest.mark.parametrize("file", ["", "tokenizers/target.json"])
def test_a_tokenizer_normalizes_once(file, corpus_folder, tmp_path):
    cfg = config("seq2seq", normalize=("lowercase",))
    train = load_corpus(cfg, corpus_folder).train
    saved = train_tokenizers(cfg.data, train)
    saved.save(tmp_path / "tokenizers")
    data = dataclasses.replace(cfg.data, tokenizer="file", tokenizer_file=str(tmp_path / file))
    for steps in ((), ("lowercase",)):
        actual = train_tokenizers(dataclasses.replace(data, normalize=steps), train)
        assert actual.target.to_json() == saved.target.to_json()
    with pytest.raises(UserError, match=r"must be \(\) or \('lowercase',\) for data.tokenizer_file="):
        train_tokenizers(dataclasses.replace(data, normalize=("nfkc",)), train)


def test_the_weights_of_a_mixture_are_not_dropped(tmp_path):
    """Regression test: prepared data held each entry once, so that training on it drew other batches."""
    data = DataConfig(source="tsv", train=("a.tsv", "b.tsv"), validation="a.tsv", weights=(1.0, 3.0))
    with pytest.raises(UserError, match=r"data.weights=\(1.0, 3.0\): is not stored in prepared data; prepare each"):
        prepare(Config(data=data), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_corpus_without_end_is_not_prepared(tmp_path):
    cfg = Config(data=DataConfig(heldout_examples=1))
    with pytest.raises(DataError, match="data.source='cldr_translation' is generated on the fly and endless"):
        prepare(cfg, None, tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_links_are_not_dropped(tmp_path):
    data = DataConfig(source="parallel_lines", train="a.{lang}", validation="a.{lang}", links="links")
    cfg = Config(data=data, train=TrainConfig(guided_alignment=0.5))
    with pytest.raises(UserError, match="data.links='links': is not stored in prepared data: train on the files"):
        prepare(cfg, tmp_path, tmp_path / "out")


def test_the_test_split_is_that_of_the_folders_which_have_one(tmp_path, caplog):
    for name in ("train", "held", "hold", "test"):
        (tmp_path / f"{name}.tsv").write_text(f"{name}\tx\n" * 9)
    files = {"train": "train.tsv", "tokenizer": "bytes"}
    prepare(config("seq2seq", **files, validation="held.tsv"), tmp_path, tmp_path / "a")
    prepare(config("seq2seq", **files, validation="hold.tsv", test="test.tsv"), tmp_path, tmp_path / "b")
    corpus = load_corpus(prepared(config("seq2seq", tokenizer="bytes"), tmp_path / "a", tmp_path / "b"), None)
    sources = [[example["source"] for example in split] for split in (corpus.train, corpus.validation, corpus.test)]
    assert sources == [["train"] * 18, ["held"] * 9 + ["hold"] * 9, ["test"] * 9]
    assert f"no test split: {tmp_path / 'a'}; the test examples are from the others" in caplog.text
    assert "is read once" not in caplog.text


def test_the_same_held_out_files_of_several_folders_are_read_once(tmp_path, caplog):
    lines = {name: [f"{name}\t{number}" for number in range(9)] for name in ("a", "b", "held", "test")}
    lines["held"][4] = "\tblank"
    for name, texts in lines.items():
        (tmp_path / f"{name}.tsv").write_text("\n".join(texts))
    for name, test in (("a", "test"), ("b", "test"), ("c", "held")):
        held_out = {"validation": "held.tsv", "test": f"{test}.tsv", "tokenizer": "bytes"}
        prepare(config("seq2seq", train=f"{name}.tsv".replace("c", "a"), **held_out), tmp_path, tmp_path / name)
    cfg = prepared(config("seq2seq", tokenizer="bytes"), *(tmp_path / name for name in "abc"))
    corpus = load_corpus(cfg, None)
    raw = load_corpus(config("seq2seq", train=("a.tsv", "b.tsv", "a.tsv"), **held_out), tmp_path)
    assert list(corpus.train) == list(raw.train)
    assert list(corpus.validation) == list(raw.validation)
    assert [example["source"] for example in corpus.test] == ["test"] * 9 + ["held"] * 8
    assert corpus.left_out["validation"] == {"blank texts": 1}
    assert f"the validation split of {tmp_path / 'b'} is the one of {tmp_path / 'a'}: it is read once" in caplog.text
    assert f"the test split of {tmp_path / 'c'}" not in caplog.text
