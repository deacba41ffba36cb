"""Arrays of token ids are data, too."""

import jax.numpy as jnp
import numpy as np
import pytest

import tformer_jax as tj
from tests.helpers import tiny
from tformer_jax.base.errors import UserError
from tformer_jax.data.corpora.corpus import DataError
from tformer_jax.data.corpora.python import python_corpus
from tformer_jax.data.tokenizers.base import FIRST

EOS = 2
IDS = {"tokenizer": "ids", "vocab_size": 10 + FIRST, "source": "python"}


def config(family: str, **data) -> tj.Config:
    buckets = {"bucket_lengths": (8,), "batch_tokens": 64}
    settings = {"batching": "windows", "window": 8, "batch_size": 2} if family == "decoder_lm" else buckets
    model = tiny(family, vocab_size=None, source_vocab_size=None, num_classes=None)
    return tj.Config(model=model, data=tj.DataConfig(**(IDS | settings | data)))


def test_batches_have_the_ids_after_the_special_tokens():
    rows = [(np.array([3, 1, 4]), np.array([4, 1, 3], np.uint8))] * 8
    batch = next(tj.batches(config("seq2seq"), rows))
    assert batch["source"][0, :4].tolist() == [FIRST + 3, FIRST + 1, FIRST + 4, EOS]
    assert batch["target_out"][0, :4].tolist() == [FIRST + 4, FIRST + 1, FIRST + 3, EOS]


@pytest.mark.parametrize("ids", [[0, 9], (0, 9), range(0, 10, 9), np.array([0, 9], np.uint16), jnp.array([0, 9])])
def test_ids_are_sequences_or_arrays_of_integers(ids):
    corpus = python_corpus(config("decoder_lm"), {"train": [ids], "validation": [{"text": ids}], "test": ids})
    assert corpus.train == corpus.validation == corpus.test == [{"text": "0 9"}]
    pair = [(ids, "1 2")]
    expected = [{"source": "0 9", "target": "1 2"}]
    assert python_corpus(config("seq2seq"), {"train": pair, "validation": pair}).train == expected


def test_labels_are_no_ids():
    labeled = [([1, 2], "a"), ([2], 3)]
    corpus = python_corpus(config("classifier"), {"train": labeled, "validation": labeled})
    assert corpus.train == [{"text": "1 2", "label": "a"}, {"text": "2", "label": "3"}]
    with pytest.raises(DataError, match=r"validation example 0 has a blank label$"):
        python_corpus(config("classifier"), {"train": labeled, "validation": [([1, 2], " ")]})
    for wrong in (([1, 2], [3]), ([1, 2], "a", "b"), ([1, 2],)):
        with pytest.raises(DataError, match=r"train example 0 is a tuple"):
            python_corpus(config("classifier"), {"train": [wrong], "validation": labeled})
    for wrong in (True, 0.5):
        with pytest.raises(DataError, match=r"train example 0 is a tuple"):
            python_corpus(config("classifier"), {"train": [([1], wrong)], "validation": labeled})
    with pytest.raises(DataError, match=r"train has only the label 'a': a classifier needs at least two"):
        python_corpus(config("classifier"), {"train": labeled[:1], "validation": labeled[:1]})


def test_only_the_side_whose_tokenizer_reads_ids_has_them():
    """Regression test: ids of the other side became a text of numbers, which its tokenizer split into digits."""
    cfg = config("seq2seq", tokenizer="words", source_tokenizer="ids", shared_vocab=False)
    split = [([1, 2], "one two")]
    corpus = python_corpus(cfg, {"train": split, "validation": split})
    assert corpus.train == [{"source": "1 2", "target": "one two"}]
    with pytest.raises(DataError, match=r"all of them str; of token ids with data.tokenizer='ids'"):
        python_corpus(cfg, {"train": [([1, 2], [3])], "validation": split})


@pytest.mark.parametrize(
    ("changes", "ids", "problem"),
    [
        ({}, [1, 10], "data.vocab_size=14: 14 holds the ids 0 to 9 .* the training split has '10'; write at least 15"),
        ({}, [1, -1], "has '-1'; write each id as a number from 0"),
        ({}, "a 1", "has 'a'; write each id"),
        ({}, "01", "has '01'; write each id"),
        ({}, [1, 1.5], "train example 0 is a list"),
        ({}, [True], "train example 0 is a list"),
        ({"tokenizer": "words"}, [1, 2], r"reads a text \(str\); of token ids with data.tokenizer='ids'"),
    ],
)
def test_other_data_is_refused(changes, ids, problem):
    with pytest.raises(UserError, match=problem):
        tj.batches(config("decoder_lm", **changes), [ids])


@pytest.mark.long
def test_a_model_of_ids_counts(tmp_path):
    """A model of one array, in which 0 to 9 are repeated, continues to count."""
    cfg = tj.configs.change(
        config("decoder_lm", batch_size=8),
        model={"dim": 16, "ffn_dim": 32},
        optim={"learning_rate": 0.03, "warmup_steps": 5},
        train={"steps": 80, "eval_every": 80},
    )
    counts = np.tile(np.arange(10), 200)
    run = tj.train(cfg, {"train": counts, "validation": counts[:200]}, run=tmp_path / "run")
    assert run.generate(["3 4 5"], max_new_tokens=5)[0].split() == ["6", "7", "8", "9", "0"]
    assert run.config.model.vocab_size == 10 + FIRST
