"""Stored distributions of a teacher: each label of a batch has those of its own place; writing can be killed."""

import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.prepared import config, prepared, write_corpus
from tests.helpers import rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.data import distributions
from tformer_jax.data.columns import TAUGHT_IDS, TAUGHT_LOG_P
from tformer_jax.data.corpora import load_corpus
from tformer_jax.data.pipeline import train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.rows import Shards
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.special_tokens import IGNORED

TOP = 3
PACKED = {"batching": "packed", "window": 40, "batch_size": 4}


def ready(kind, corpus_folder, folder, *names, **changes):
    """Returns a config of prepared data with all sizes, its corpus and its tokenizers."""
    cfg = config(kind, **changes)
    names = names or ("p",)
    for name in names:
        given = Tokenizers.load(folder / names[0] / "tokenizers") if name != names[0] else None
        prepare(cfg, corpus_folder, folder / name, tokenizers=given)
    cfg = prepared(cfg, *(folder / name for name in names))
    corpus = load_corpus(cfg, None)
    tokenizers = Tokenizers.load(corpus.tokenizers)
    model = dataclasses.replace(cfg.model, vocab_size=tokenizers.target.vocab_size)
    return dataclasses.replace(cfg, model=model), corpus, tokenizers


def tell_places(examples):
    """Yields for each label its own id and those below, and as log-probabilities its place and a sum over the row."""
    for example in examples:
        labels = example["target_out" if "target_out" in example else "targets"]
        facts = np.stack([np.arange(len(labels)), np.full(len(labels), labels.sum()), labels], axis=1)
        yield facts.astype(np.float32), np.maximum(labels[:, None] - np.arange(TOP), 0)


def write(ready, folder, compute=tell_places, **facts):
    cfg, corpus, tokenizers = ready
    facts = {"top": TOP, "teacher": {"digest": "a"}, **facts}
    facts["data"] = distributions.facts_of_data(cfg, corpus, tokenizers)
    written = distributions.write(folder, facts, cfg, corpus, tokenizers, compute, lambda _: None)
    train = dataclasses.replace(cfg.train, teacher=str(folder))
    return written, dataclasses.replace(cfg, train=train)


@pytest.mark.parametrize(
    "case",
    rest_slow(
        [
            ("seq2seq", {"bucket_lengths": (12, 40), "long_pairs": "truncate", "batch_multiple": 2}, ("p", "q")),
            ("decoder_lm packed", {"window": 8, "batch_size": 4}, ("p",)),
            ("seq2seq", PACKED, ("p",)),
            ("seq2seq", {"bucket_lengths": (18,), "batch_multiple": 2}, ("p",)),
        ],
        fast=2,
    ),
)
def test_each_label_has_the_distribution_of_its_place(case, corpus_folder, tmp_path):
    """Also of dropped and truncated pairs, pieces of documents, several folders, and the rows of one process."""
    kind, changes, names = case
    made = ready(kind, corpus_folder, tmp_path, *names, **changes)
    written, cfg = write(made, tmp_path / "top")
    (plain, corpus, tokenizers), label = made, distributions.label_key(cfg)
    batches, expected = (train_batches(each, corpus, tokenizers) for each in (cfg, plain))
    half = train_batches(cfg, corpus, tokenizers, shards=Shards(2, (1,)))
    labels = 0
    for batch, same in itertools.islice(zip(batches, expected, strict=True), 60):
        ids, log_p = batch.pop(TAUGHT_IDS), batch.pop(TAUGHT_LOG_P)
        assert batch.keys() == same.keys() and all((batch[key] == same[key]).all() for key in batch)
        counted = batch[label] != IGNORED
        labels += counted.sum()
        assert (ids[counted][:, 0] == batch[label][counted]).all()
        assert (log_p[counted][:, 2] == batch[label][counted]).all() and not log_p[~counted].any()
        if "target_segments" not in batch and "segments" not in batch:
            assert (log_p[..., 0] == np.where(counted, np.arange(counted.shape[1]), 0)).all()
            assert (log_p[..., 1] == np.where(counted, (batch[label] * counted).sum(axis=1, keepdims=True), 0)).all()
        assert (next(half)[TAUGHT_IDS] == ids[len(ids) // 2 :]).all()
    assert labels > written["labels"]  # more than an epoch


@pytest.fixture(scope="module")
def pairs(corpus_folder, tmp_path_factory):
    return ready("seq2seq", corpus_folder, tmp_path_factory.mktemp("prepared"))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_command_continues(pairs, tmp_path, monkeypatch):
    """From the last complete block, whatever was written of the next one."""
    monkeypatch.setattr(distributions, "BLOCK", 16)
    calls = []

    def until(limit):
        def compute(examples):
            calls.append(len(examples))
            if len(calls) > limit:
                raise KeyboardInterrupt
            return tell_places(examples)

        return compute

    write(pairs, tmp_path / "whole", until(100))
    blocks, expected = len(calls), contents(tmp_path / "whole")
    for top, ends in ((0, 0), (7, 0), (1000, 3), (0, 8 * 16), (10**6, 8 * 20)):  # bytes that are lost, or added
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            write(pairs, tmp_path / "top", until(3))
        with pytest.raises(UserError, match="top is not complete: repeat the command"):
            train_batches(write_config(pairs, tmp_path / "top"), *pairs[1:])
        for name, size in (("train.top", top), ("train.ends", ends)):
            path = tmp_path / "top" / name
            raw = path.read_bytes()
            path.write_bytes(raw[: max(len(raw) - size, 0)] if size != 7 else raw + b"1234567")
        calls.clear()
        write(pairs, tmp_path / "top", until(100))
        assert contents(tmp_path / "top") == expected
        assert (len(calls) < blocks) == (top < 10**6)
        calls.clear()
        assert write(pairs, tmp_path / "top", until(0))[0]["labels"]  # complete: nothing is computed
        distributions_files = [tmp_path / "top" / name for name in distributions.FILES]
        for path in distributions_files:
            path.unlink()


def write_config(pairs, folder):
    return dataclasses.replace(pairs[0], train=dataclasses.replace(pairs[0].train, teacher=str(folder)))


@pytest.mark.slow
def test_a_killed_command_continues(tmp_path):
    write_corpus(tmp_path)
    code = f"from {__name__} import kill_until_done; kill_until_done({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert contents(tmp_path / "top") == contents(tmp_path / "whole")


def kill_until_done(folder):
    """Writes the distributions of the corpus in `folder` at once, and again in children that are killed."""
    made, distributions.BLOCK = ready("seq2seq", Path(folder), Path(folder)), 8

    def compute(examples):
        time.sleep(0.02)
        return tell_places(examples)

    write(made, Path(folder, "whole"))
    draw, kills, status = random.Random(0), 0, 1
    while status:
        child = os.fork()
        if not child:
            write(made, Path(folder, "top"), compute)
            os._exit(0)
        time.sleep(draw.uniform(0, 0.1 + 0.01 * kills))
        os.kill(child, 9)
        status = os.waitpid(child, 0)[1]
        kills += bool(status)
    assert kills


def test_other_distributions_are_refused(pairs, corpus_folder, tmp_path):
    _, cfg = write(pairs, tmp_path / "top")
    _, corpus, tokenizers = pairs

    def with_data(**changes):
        return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **changes))

    longer = "another value of the longest rows, data.long_pairs or data.long_documents"
    for changed, sentence in (
        (with_data(bucket_lengths=(20,)), longer),
        (with_data(long_pairs="truncate"), longer),
        (with_data(transforms=("case",)), "stored distributions need data.source='prepared', without data.transforms"),
        (dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=99)), "value of model.vocab_size"),
    ):
        with pytest.raises(UserError, match=sentence):
            train_batches(changed, corpus, tokenizers)
    other = Tokenizers(ByteTokenizer(), ByteTokenizer())
    with pytest.raises(UserError, match="another value of the tokenizers"):
        train_batches(cfg, corpus, other)
    more = ready("seq2seq", corpus_folder, tmp_path, "p", "q")
    with pytest.raises(UserError, match=r"another value of the prepared training examples, \[81, .* instead of \[162,"):
        train_batches(cfg, more[1], tokenizers)
    with pytest.raises(UserError, match="another value of teacher, .*'a'.* instead of .*'b'.*: write them again with"):
        write(pairs, tmp_path / "top", teacher={"digest": "b"})
    with pytest.raises(UserError, match="another value of top, 3 instead of 5"):
        write(pairs, tmp_path / "top", top=5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(UserError, match="other contains files other than distributions: choose another --output"):
        write(pairs, tmp_path / "other")
    (tmp_path / "top" / "distributions.json").write_text("[")
    with pytest.raises(UserError, match="distributions.json is damaged .*: write the distributions again"):
        train_batches(cfg, corpus, tokenizers)
