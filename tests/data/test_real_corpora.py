"""The corpora of the shipped configs, in the folder TFORMER_DATA."""

import dataclasses
import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tformer_jax.cli.config_file import read_config
from tformer_jax.data.corpora import DataError, load_corpus, tfds
from tformer_jax.data.pipeline import train_batches
from tformer_jax.data.tokenizers import normalizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.lab.benchmarks.data import count_positions

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "manual", "like"),
    [
        ("multi30k", "multi30k", "translate_multi30k.py"),
        ("tatoeba_en_zh", "tatoeba_en_zh", "translate_tatoeba_zh.py"),
        ("rt_polarity/split", "rt_polarity", "classify_rt_polarity.py"),
    ],
)
def test_own_builders_give_back_the_files(dataset, manual, like, tmp_path):
    cfg = read_config(str(CONFIGS / like))
    splits = {"train": "train", "validation": "validation", "test": "test" if cfg.data.test else "validation"}
    data = dataclasses.replace(cfg.data, source="tfds", dataset=dataset, **splits)
    of_tfds = dataclasses.replace(cfg, data=data)
    tfds.download(of_tfds, tmp_path, Path(os.environ["TFORMER_DATA"]) / manual)
    built, files = load_corpus(of_tfds, tmp_path), load(like)
    names = {"0": "negative", "1": "positive"}
    for split in splits:
        actual, expected = (getattr(corpus, split)[:] for corpus in (built, files))
        assert actual == [{**e, "label": names[e["label"]]} if "label" in e else e for e in expected]


def test_a_damaged_download_is_refused(tmp_path):
    manual = shutil.copytree(Path(os.environ["TFORMER_DATA"]) / "multi30k", tmp_path / "manual")
    (manual / "val.de.gz").chmod(0o600)
    (manual / "val.de.gz").write_bytes(b"other")
    cfg = read_config(str(CONFIGS / "translate_multi30k.py"))
    data = dataclasses.replace(cfg.data, source="tfds", dataset="multi30k", train="train")
    with pytest.raises(DataError, match="multi30k cannot be prepared: "):
        tfds.download(dataclasses.replace(cfg, data=data), tmp_path / "data", manual)


@pytest.mark.slow
def test_buckets_of_multi30k_waste_little():
    cfg = read_config(str(CONFIGS / "translate_multi30k.py"))
    corpus = load("translate_multi30k.py")
    batches = train_batches(cfg, corpus, train_tokenizers(cfg.data, corpus.train))
    real, positions = np.sum([count_positions(cfg, next(batches)) for _ in range(300)], axis=0)
    assert 1 - real / positions < 0.1


@pytest.mark.parametrize("language", ["en", "de"])
def test_normalization_gives_the_published_references(language):
    folder = Path(os.environ["TFORMER_DATA"]) / "multi30k"
    with gzip.open(folder / f"test_2016_flickr.{language}.gz", "rt", encoding="utf-8") as file:
        raw = file.read().splitlines()
    published = (folder / f"test_2016_flickr.lc.norm.tok.{language}").read_text(encoding="utf-8").splitlines()
    normalize = normalizer(("lowercase", "punctuation", "moses"), language)
    assert [normalize(text) for text in raw] == published
