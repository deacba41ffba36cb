"""Documents whose vocabulary has no token that ends them, as nanoGPT's characters have none."""

import itertools
import json

import numpy as np
import pytest

from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data.corpora import DataError, load_corpus
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import MASK, Tokenizers, from_json
from tformer_jax.data.tokenizers.standalone import character_tokenizer
from tformer_jax.data.tokenizers.surgery import extend
from tformer_jax.data.tokenizers.tokens import document_end
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


def test_the_end_stays_outside_of_larger_vocabularies():
    """Regression test: it became the first new token. Tokens for new characters start as the mean of all."""
    masked = LETTERS.extended([MASK])
    (changed, rows) = extend(masked, ["d"], ["<br>", "Ω"], ["de", "fr"])
    for tokenizer in (masked, changed, changed.extended(["<2nl>"])):
        restored = from_json(json.loads(json.dumps(tokenizer.to_json())))
        for each in (tokenizer, restored):
            assert each.special.eos == (each.special.start,) == (each.vocab_size,)
            assert document_end(each) is None
            assert each.decode(each.encode("abc")) == "abc"
    every = tuple(range(masked.vocab_size))
    assert rows == ((0,), (1,), (2,), every, (1,), every, (3,), every, every)
    assert [changed.id_of(name) for name in (MASK, "<2de>", "<2fr>")] == [6, 7, 8]
    assert changed.encode("d<br>Ω") == [3, 4, 5]
