"""Batches: nothing lost, nothing repeated, fixed shapes, and a saved position restored to the example."""

import collections
import itertools
import json
import random

import numpy as np
import pytest

from tformer_jax.config import Config, ConfigError, DataConfig, EvalConfig, ModelConfig
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.tokenizers import train_tokenizers
from tformer_jax.data.windows import Windows, covering_windows
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD

draw = random.Random(0)
WORDS = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 11))) + str(number) for number in range(60)]
DATA = {
    "seq2seq": DataConfig(
        source="tsv_pairs", train_file="-", tokenizer="characters", bucket_lengths=(6, 10, 16), batch_tokens=40
    ),
    "classifier": DataConfig(
        source="labelled_tsv", train_file="-", tokenizer="characters", bucket_lengths=(6, 16), batch_tokens=40
    ),
    "decoder_lm": DataConfig(
        source="text", train_file="-", tokenizer="characters", batching="windows", window=7, batch_size=3
    ),
}
CORPORA = {
    "seq2seq": Corpus([{"source": word, "target": word.upper()} for word in WORDS], [], []),
    "classifier": Corpus([{"text": word, "label": "xy"[len(word) % 2]} for word in WORDS], [], [], ("x", "y")),
    "decoder_lm": Corpus([{"text": "".join(WORDS[:20])}, {"text": "second"}], [], []),
}


def setup(family: str, **changes):
    cfg = Config(
        seed=changes.pop("seed", 0),
        model=ModelConfig(family=family, max_length=32),
        data=DATA[family],
        eval=EvalConfig(batch_size=changes.pop("rows", 4)),
    )
    return cfg, CORPORA[family], train_tokenizers(cfg.data, CORPORA[family])


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(batches, count))


def assert_same(first, second) -> None:
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("family", DATA)
def test_restored_anywhere_it_continues_with_the_very_next_batch(family):
    arguments = setup(family)
    batches = train_batches(*arguments)
    states, whole = [], []
    for _ in range(40):
        states.append(json.dumps(batches.get_state()))
        whole.append(next(batches))
    for start in random.Random(1).sample(range(40), 12):
        restored = train_batches(*arguments)
        restored.set_state(json.loads(states[start]))
        assert_same(take(restored, min(3, 40 - start)), whole[start : start + 3])
        restored.close()
    batches.close()


@pytest.mark.parametrize("family", DATA)
def test_the_seed_fixes_the_order(family):
    first, again = take(train_batches(*setup(family)), 10), take(train_batches(*setup(family)), 10)
    assert_same(first, again)
    other = take(train_batches(*setup(family, seed=1)), 10)
    assert any(
        a[key].shape != b[key].shape or (a[key] != b[key]).any() for a, b in zip(first, other, strict=True) for key in a
    )


def test_each_epoch_has_every_example_once_and_another_order():
    cfg, corpus, tokenizers = setup("seq2seq")
    seen = []
    for batch in train_batches(cfg, corpus, tokenizers):
        seen += [tokenizers.source.decode(row) for row in batch["source"]]
        if len(seen) > 4 * len(WORDS):
            break
    counts = collections.Counter(seen)
    assert set(counts) == set(WORDS)
    assert max(counts.values()) - min(counts.values()) <= 2
    assert seen[: len(WORDS)] != seen[len(WORDS) : 2 * len(WORDS)]


def test_shapes_are_those_of_the_buckets_and_multiples_are_kept():
    cfg, corpus, tokenizers = setup("seq2seq")
    shapes = {batch["source"].shape for batch in take(train_batches(cfg, corpus, tokenizers, multiple_of=2), 60)}
    assert shapes == {(6, 6), (4, 10), (2, 16)}


def test_a_translation_batch_by_hand():
    cfg, _, tokenizers = setup("seq2seq")
    (batch,) = evaluation_batches(cfg, [{"source": "ab", "target": "ABCD"}], tokenizers)
    a, b = tokenizers.source.encode("ab")
    capitals = tokenizers.target.encode("ABCD")
    np.testing.assert_array_equal(batch["source"][0], [a, b, EOS, PAD, PAD, PAD])
    np.testing.assert_array_equal(batch["target_in"][0], [BOS, *capitals, PAD])
    np.testing.assert_array_equal(batch["target_out"][0], [*capitals, EOS, IGNORED])
    assert (batch["source"][1:] == PAD).all()
    assert (batch["target_out"][1:] == IGNORED).all()


def test_long_texts_are_cut_but_targets_keep_their_end(caplog):
    cfg, _, tokenizers = setup("seq2seq")
    (batch,) = evaluation_batches(cfg, [{"source": "a" * 50, "target": "A" * 50}], tokenizers)
    assert batch["source"].shape == (4, 16)
    assert batch["target_out"][0, -1] == batch["source"][0, -1] == EOS
    assert "cutting texts of more than 15 tokens, the first of 50" in caplog.text


@pytest.mark.parametrize("family", ["seq2seq", "classifier"])
def test_evaluation_sees_every_example_once(family):
    cfg, corpus, tokenizers = setup(family, rows=7)
    batches = list(evaluation_batches(cfg, corpus.train, tokenizers, corpus.labels, multiple_of=4))
    key = "source" if family == "seq2seq" else "tokens"
    assert {len(batch[key]) for batch in batches} == {8}
    texts = [tokenizers.source.decode(row) for batch in batches for row in batch[key] if row.any()]
    assert sorted(texts) == sorted(WORDS)
    if family == "classifier":
        labels = np.concatenate([batch["label"] for batch in batches])
        assert (labels != IGNORED).sum() == len(WORDS)
        assert collections.Counter(labels[labels != IGNORED]) == collections.Counter(len(word) % 2 for word in WORDS)


def test_every_window_is_reachable():
    stream = np.arange(20, dtype=np.int32)
    windows = Windows(stream, 7)
    assert len(windows) == 13
    for offset in range(13):
        np.testing.assert_array_equal(windows[offset]["tokens"], stream[offset : offset + 7])
        np.testing.assert_array_equal(windows[offset]["targets"], stream[offset + 1 : offset + 8])
    cfg, corpus, tokenizers = setup("decoder_lm")
    first = [int(row[0]) for batch in take(train_batches(cfg, corpus, tokenizers), 200) for row in batch["tokens"]]
    assert set(first) >= set(tokenizers.target.encode("".join(WORDS[:20])))


def test_documents_are_joined_by_eos():
    cfg, _, tokenizers = setup("decoder_lm")
    (batch, *_) = evaluation_batches(cfg, [{"text": "a1"}, {"text": "b"}], tokenizers)
    a, one = tokenizers.target.encode("a1")
    np.testing.assert_array_equal(batch["tokens"][0, :3], [a, one, EOS])
    np.testing.assert_array_equal(batch["targets"][0, :4], [one, EOS, *tokenizers.target.encode("b"), IGNORED])


@pytest.mark.parametrize("length", [2, 20, 21, 22, 41, 60])
def test_covering_windows_predict_each_token_but_the_first_once(length):
    stream = np.arange(100, 100 + length, dtype=np.int32)
    batches = list(covering_windows(stream, 5, 4))
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    tokens = np.concatenate([batch["tokens"].ravel() for batch in batches])
    np.testing.assert_array_equal(targets[targets != IGNORED], stream[1:])
    np.testing.assert_array_equal(tokens[targets != IGNORED], stream[:-1])


@pytest.mark.parametrize(
    ("family", "multiple", "sentence"),
    [
        ("seq2seq", 3, "data.batch_tokens=40: must be at least 48 to give each of 3 devices an example"),
        ("decoder_lm", 2, "data.batch_size=3: must be a multiple of the 2 devices that share a batch"),
    ],
)
def test_batches_that_do_not_divide(family, multiple, sentence):
    with pytest.raises(ConfigError, match=sentence):
        train_batches(*setup(family), multiple_of=multiple)


def test_a_text_shorter_than_a_window():
    cfg, _, tokenizers = setup("decoder_lm")
    with pytest.raises(ConfigError, match="data.window=7: the training text has only 3 tokens"):
        train_batches(cfg, Corpus([{"text": "abc"}], [], []), tokenizers)
