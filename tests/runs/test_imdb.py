"""The config for IMDb, trained on made reviews of the dataset's form."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.helpers import with_settings
from tformer_jax.cli.config_file import read_config
from tformer_jax.runs import experiment, training

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tutorials.py"
LONGEST = 700
"""Words of the longest review; rows have 512 tokens."""


class Records(list):
    """A data source in memory."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def reviews(builder, *, split, **_):
    """Returns reviews of 5 to `LONGEST` words, a fifth of which say whether the review is positive."""
    draw = np.random.default_rng(len(str(split)))
    actual = []
    for number, length in enumerate(np.geomspace(5, LONGEST, 60).astype(int)):
        words = draw.choice(["the", "film", "was", "long", "and", "<br />"], length)
        words[draw.random(length) < 0.2] = words[0] = ("bad", "good")[number % 2]
        actual.append({"text": " ".join(words).encode(), "label": number % 2})
    return Records(actual)


@pytest.mark.slow
def test_the_imdb_config_learns_made_reviews(tmp_path):
    cfg = read_config(f"{CONFIG}:imdb")
    small = {"dim": 16, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 1, "dropout": 0.0}
    cfg = dataclasses.replace(
        cfg,
        model=with_settings(cfg.model, **small),
        data=dataclasses.replace(cfg.data, bucket_lengths=(512,), batch_tokens=8 * 512),
        train=dataclasses.replace(cfg.train, steps=24, log_every=24),
        optim=dataclasses.replace(cfg.optim, learning_rate=1e-2, warmup_steps=5),
    )
    with tfds.testing.mock_data(as_data_source_fn=reviews):
        training.run(experiment.build(cfg, tmp_path / "run"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["test"]["accuracy"] > 90
