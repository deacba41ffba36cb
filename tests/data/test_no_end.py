"""Documents whose vocabulary has no token that ends them, as nanoGPT's characters have none."""

import itertools

import numpy as np
import pytest

from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.standalone import character_tokenizer
from tformer_jax.special_tokens import IGNORED

TEXTS = ("abca", "bb", "cab")
LETTERS = character_tokenizer("abc")
TOKENIZERS = Tokenizers(LETTERS, LETTERS)


def config(folder, batching: str) -> Config:
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    data = DataConfig(
        source="lines", train="texts.txt", validation="texts.txt", batching=batching, window=4, batch_size=2
    )
    return Config(model=ModelConfig(family="decoder_lm", max_length=8), data=data)


@pytest.mark.parametrize("batching", ["packed", "windows"])
def test_every_token_but_the_first_is_predicted(tmp_path, batching):
    """Regression test: the end, which is outside of the vocabulary, was a label, too."""
    cfg = config(tmp_path, batching)
    corpus = load_corpus(cfg, tmp_path)
    texts = TEXTS if batching == "packed" else ("".join(TEXTS),)
    expected = [token for text in texts for token in LETTERS.encode(text[1:])]
    labels = np.concatenate([batch["targets"].ravel() for batch in evaluation_batches(cfg, corpus.test, TOKENIZERS)])
    assert sorted(labels[labels != IGNORED]) == sorted(expected)
    batches = train_batches(cfg, corpus, TOKENIZERS)
    for batch in itertools.islice(batches, 4):
        followed = batch["targets"][:, :-1] == batch["tokens"][:, 1:]
        assert (followed | (batch["targets"][:, :-1] == IGNORED)).all()
    batches.close()


def test_a_stream_of_such_documents_is_not_prepared(tmp_path):
    with pytest.raises(DataError, match="the vocabulary has no token that separates documents"):
        prepare(config(tmp_path, "windows"), tmp_path, tmp_path / "prepared", tokenizers=TOKENIZERS)
    assert not (tmp_path / "prepared").exists()
