"""Which checkpoints of BERT are read and written as classifiers."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers import build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.interop import hf

BERT = {"norm_placement": "post", "position": "learned", "embedding_norm": True, "token_types": 2, "norm_eps": 1e-12}
BERT |= {"scale_embeddings": False, "activation": "gelu"}
CLASSIFIER = BERT | {"pooling": "first", "pooler": True, "tie_embeddings": "none"}
MASKED_LM = BERT | {"head_transform": True, "output_bias": True, "tie_embeddings": "output"}


def saved(folder: Path, family: str, settings: dict[str, Any], **config: Any) -> Path:
    """Saves a checkpoint of random parameters with other fields in its config.json, and returns its folder."""
    cfg = tiny(family, **settings)
    hf.save(folder, "bert", cfg, build(cfg)[1])
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    "config",
    [{}, {"architectures": None}, {"problem_type": "single_label_classification"}, {"problem_type": None}],
)
def test_a_classifier_is_read(config, tmp_path):
    cfg, _ = hf.load(saved(tmp_path, "classifier", CLASSIFIER, **config))
    assert (cfg.family, cfg.num_classes, cfg.pooler) == ("classifier", 3, True)


def test_heads_of_other_classes_are_refused(tmp_path):
    """Those that label tokens have arrays of the same names, without the pooler."""
    saved(tmp_path, "classifier", CLASSIFIER, architectures=["BertForTokenClassification"])
    arrays = load_file(tmp_path / "model.safetensors")
    save_file({name: arrays[name] for name in arrays if "pooler" not in name}, tmp_path / "model.safetensors")
    problem = "its head is of BertForTokenClassification, but only heads of BertForSequenceClassification are supported"
    with pytest.raises(UserError, match=f"^this checkpoint cannot be read: {problem}$"):
        hf.load(tmp_path)
    save_file({name: arrays[name] for name in arrays if "classifier" not in name}, tmp_path / "model.safetensors")
    assert hf.load(tmp_path, num_classes=5)[0].num_classes == 5


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_heads_of_other_problems_are_refused(kind, tmp_path):
    problem = f"problem_type='{kind}' is not supported, only 'single_label_classification' is"
    with pytest.raises(UserError, match=f"^this checkpoint cannot be read: {problem}$"):
        hf.load(saved(tmp_path / "classifier", "classifier", CLASSIFIER, problem_type=kind))
    cfg, _ = hf.load(saved(tmp_path / "masked_lm", "masked_lm", MASKED_LM, problem_type=kind))
    assert cfg.family == "masked_lm"


def test_a_head_of_one_label_is_refused(tmp_path):
    saved(tmp_path, "classifier", CLASSIFIER, id2label={"0": "LABEL_0"})
    with pytest.raises(UserError, match="^this checkpoint cannot be read: its head has one label, a score rather"):
        hf.load(tmp_path)


def test_token_types_are_needed_to_be_written(tmp_path):
    cfg = tiny("classifier", **CLASSIFIER | {"token_types": 0})
    with pytest.raises(UserError, match="^model_type 'bert' cannot represent this model: model.token_types=0$"):
        hf.save(tmp_path / "out", "bert", cfg, build(cfg)[1])


@pytest.mark.parametrize("names", [{"a": "bad"}, ["bad", "good"], 3])
def test_damaged_class_names_are_refused(names):
    with pytest.raises(UserError, match="this checkpoint cannot be read: id2label must have names by number, such"):
        hf.labels({"id2label": names})
