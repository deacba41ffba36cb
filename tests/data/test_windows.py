"""Windows: training reaches each, and evaluation predicts each token once."""

import collections

import numpy as np
import pytest

from tests.data.test_pipeline import setup, take
from tformer_jax.base.errors import UserError
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.features import Tokenized
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.rows import token_stream
from tformer_jax.data.windows import Windows, covering_windows
from tformer_jax.special_tokens import EOS, IGNORED, PAD


@pytest.mark.long
def test_every_window_is_reachable():
    stream = np.arange(20, dtype=np.int32)
    windows = Windows(stream, 7)
    assert len(windows) == 13
    batch = windows.batch(range(13))
    for offset in range(13):
        np.testing.assert_array_equal(batch["tokens"][offset], stream[offset : offset + 7])
        np.testing.assert_array_equal(batch["targets"][offset], stream[offset + 1 : offset + 8])
    cfg, corpus, tokenizers = setup("windows")
    rows = token_stream(Tokenized(corpus.train, tokenizers))
    count = len(rows) - 7
    first_epoch = [
        tuple(row) for batch in take(train_batches(cfg, corpus, tokenizers), count // 3) for row in batch["tokens"]
    ]
    every = collections.Counter(tuple(rows[offset : offset + 7]) for offset in range(count))
    assert sum((every - collections.Counter(first_epoch)).values()) == count - 3 * (count // 3)


def test_documents_are_joined_by_eos():
    cfg, _, tokenizers = setup("windows")
    (batch, *_) = evaluation_batches(cfg, [{"text": "a1"}, {"text": "b"}], tokenizers)
    a, single = tokenizers.target.encode("a1")
    np.testing.assert_array_equal(batch["tokens"][0, :3], [a, single, EOS])
    np.testing.assert_array_equal(batch["targets"][0, :4], [single, EOS, *tokenizers.target.encode("b"), IGNORED])


def test_evaluation_has_the_prefixes_of_training():
    """Full windows are those of training at the same offsets; each row predicts its last token."""
    stream = np.arange(3, 41)
    first, last = covering_windows(stream, 5, 4, prefix_lm=True)
    expected = Windows(stream, 5, prefix_lm=True).batch([0, 5, 10, 15])
    assert first.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(first[key], array)
    assert (first["prefix"] > 1).any()
    sizes = (last["tokens"] != PAD).sum(axis=1)
    assert sizes.tolist() == [5, 5, 5, 2]
    assert (last["targets"][np.arange(4), sizes - 1] == last["tokens"][np.arange(4), sizes - 1] + 1).all()


@pytest.mark.parametrize("length", [2, 20, 21, 22, 41, 60])
def test_covering_windows_predict_each_token_but_the_first_once(length):
    stream = np.arange(100, 100 + length, dtype=np.int32)
    batches = list(covering_windows(stream, 5, 4))
    assert len(batches) == -(-(length - 1) // 20)
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    tokens = np.concatenate([batch["tokens"].ravel() for batch in batches])
    np.testing.assert_array_equal(targets[targets != IGNORED], stream[1:])
    np.testing.assert_array_equal(tokens[targets != IGNORED], stream[:-1])


def test_a_text_shorter_than_a_window():
    cfg, _, tokenizers = setup("windows")
    with pytest.raises(
        UserError, match="data.window=7: the training text has 3 tokens, fewer than one window needs .8."
    ):
        train_batches(cfg, Corpus([{"text": "abc"}], [], []), tokenizers)
