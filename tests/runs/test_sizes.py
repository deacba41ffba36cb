"""Sizes of a model that its data determine: vocabularies and classes."""

import pytest

from tests.helpers import tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.runs import experiment


def test_tied_embeddings_need_one_vocabulary():
    """Two vocabularies of equal size would pass for one."""
    source, target = (CharacterTokenizer(letters) for letters in ("abc", "xyz"))
    assert source.vocab_size == target.vocab_size
    cfg = Config(model=ModelConfig(tie_embeddings="all"))
    with pytest.raises(UserError, match="model.tie_embeddings='all': needs one vocabulary, but the tokenizers"):
        experiment.with_data_sizes(cfg, Tokenizers(source, target), None)
    experiment.with_data_sizes(cfg, Tokenizers(source, source), None)


LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)


def of_sizes(**sizes: int | None) -> Config:
    return Config(model=tiny("classifier", **sizes), data=DataConfig(source="cldr_language", bucket_lengths=(8,)))


def test_missing_sizes_are_those_of_the_data():
    actual = experiment.with_data_sizes(of_sizes(vocab_size=None, num_classes=None), TOKENIZERS, ["x", "y"]).model
    assert (actual.vocab_size, actual.num_classes) == (11, 2)
    actual = experiment.with_data_sizes(of_sizes(vocab_size=16, num_classes=2), TOKENIZERS, ["x", "y"]).model
    assert actual.vocab_size == 16


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"vocab_size": 10}, "model.vocab_size=10: is smaller than the 11 that the data has; leave it"),
        ({"num_classes": 1}, "model.num_classes=1: is smaller than the 2 that the data has"),
        ({"num_classes": 3}, "model.num_classes=3: must be 2, the number of classes in the data; leave it out"),
    ],
)
def test_sizes_that_do_not_fit(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        experiment.with_data_sizes(of_sizes(**{"num_classes": 2, **sizes}), TOKENIZERS, ["x", "y"])
