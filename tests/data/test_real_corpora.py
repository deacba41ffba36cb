"""The corpora that the shipped configs read, in the folder that TFORMER_DATA names."""

import os
from pathlib import Path

import pytest

from tformer_jax.cli.train import read_config
from tformer_jax.data.corpora import load_corpus

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load(location: str):
    cfg = read_config(str(CONFIGS / location))
    return load_corpus(cfg, Path(os.environ["TFORMER_DATA"]))


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("translate_multi30k.py", (29_000, 1014, 1000)),
        ("translate_tatoeba_zh.py", (21_518, 1272, 1272)),
        ("classify_rt_polarity.py", (8509, 1081, 1081)),
    ],
)
def test_sizes_are_the_published_ones(config, sizes):
    corpus = load(config)
    assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == sizes


def test_shakespeare_is_split_as_usual():
    corpus = load("lm_tiny_shakespeare.py")
    assert len(corpus.train[0]["text"]) == 1_003_854
    assert len(corpus.validation[0]["text"]) == 111_540
    assert len(set(corpus.train[0]["text"] + corpus.validation[0]["text"])) == 65


def test_labels_are_the_two_polarities():
    assert load("classify_rt_polarity.py").labels == ("0", "1")
