"""Checkpoints that store a shared embedding under the name of one of its copies alone."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers import build, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.interop import hf

LLAMA = {"ffn": "gated", "ffn_bias": False, "attention_bias": (), "norm": "rmsnorm", "position": "rotary"}
LLAMA |= {"head_dim": 4, "scale_embeddings": False, "tie_embeddings": "output"}
MARIAN = {"norm_placement": "post", "position": "sinusoidal_halves", "tie_embeddings": "all", "output_bias": True}
BERT = {"norm_placement": "post", "position": "learned", "embedding_norm": True, "token_types": 2}
BERT |= {"scale_embeddings": False, "head_transform": True, "tie_embeddings": "output", "output_bias": True}
MODELS = {"llama": ("decoder_lm", LLAMA), "marian": ("seq2seq", MARIAN), "bert": ("masked_lm", BERT)}


def renamed(folder: Path, model_type: str, **names: tuple[str, ...]) -> Any:
    """Saves a checkpoint with arrays under other names, or several, and returns its parameters."""
    family, settings = MODELS[model_type]
    cfg = tiny(family, **settings)
    params = build(cfg)[1]
    hf.save(folder, model_type, cfg, params)
    arrays = load_file(folder / "model.safetensors")
    for name, others in names.items():
        array = arrays.pop(name)
        arrays |= {other: array.copy() for other in others}
    save_file(arrays, folder / "model.safetensors")
    return params


@pytest.mark.parametrize(
    ("model_type", "name", "others"),
    [
        ("llama", "model.embed_tokens.weight", ("lm_head.weight",)),
        ("marian", "model.shared.weight", ("model.decoder.embed_tokens.weight",)),
        (
            "marian",
            "model.shared.weight",
            ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"),
        ),
        ("bert", "bert.embeddings.word_embeddings.weight", ("cls.predictions.decoder.weight",)),
        ("bert", "cls.predictions.bias", ("cls.predictions.decoder.bias",)),
    ],
)
def test_a_copy_replaces_the_original(model_type, name, others, tmp_path):
    params = renamed(tmp_path, model_type, **{name: others})
    cfg, actual = hf.load(tmp_path)
    assert cfg.tie_embeddings == MODELS[model_type][1]["tie_embeddings"]
    jax.tree.map(np.testing.assert_array_equal, actual, params)


def test_an_embedding_is_not_taken_from_an_untied_head(tmp_path):
    renamed(tmp_path, "llama", **{"model.embed_tokens.weight": ("lm_head.weight",)})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(
        UserError, match="the checkpoint has no array 'model.embed_tokens.weight' for the parameter embedding/"
    ):
        hf.load(tmp_path)


def test_an_export_without_safetensors_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(UserError, match=r'writing checkpoints needs safetensors: pip install -e "\.\[interop\]"'):
        hf.save(tmp_path / "out", "llama", tiny("decoder_lm"), {})
