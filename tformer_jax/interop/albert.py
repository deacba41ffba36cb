"""ALBERT: BERT with embeddings of another width, and layers that share their parameters."""

from typing import Any

from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import Settings, require
from tformer_jax.interop.bert import (
    POSITION_IDS,
    bert_config,
    bert_settings,
    check_set,
    classifier,
    encoder_rules,
    masked_lm,
)
from tformer_jax.interop.mapping import AFFINE, NORM, attention_parts, parts, rules_below

_LAYER = (
    *attention_parts("self_attention", (f"attention.{name}" for name in ("query", "key", "value", "dense"))),
    *parts("self_attention_residual/norm", "attention.LayerNorm", NORM),
    *parts("ffn/expand", "ffn", AFFINE),
    *parts("ffn/contract", "ffn_output", AFFINE),
    *parts("ffn_residual/norm", "full_layer_layer_norm", NORM),
)
_RULES = (
    *encoder_rules("albert.", "encoder.albert_layer_groups.0.albert_layers", _LAYER),
    *rules_below("projection/", "albert.encoder.embedding_hidden_mapping_in.", AFFINE),
)
_NAMES: dict[str, Any] = {"prefix": "albert.", "heads": ("predictions.", "classifier.", "sop_classifier.")}


def _settings(hf: Settings) -> Settings:
    require(hf, num_hidden_groups=1, inner_group_num=1)
    return bert_settings(hf) | {"shared_layers": True, "embedding_dim": hf["embedding_size"]}


def _config(cfg: ModelConfig) -> Settings:
    check_set(cfg, "embedding_dim")
    return bert_config(cfg) | {"embedding_size": cfg.embedding_dim}


CLASSIFIER = classifier(
    "AlbertForSequenceClassification",
    lambda hf: _settings(hf) | {"pooling": "first", "pooler": True},
    _config,
    (*_RULES, *rules_below("pooler/", "albert.pooler.", AFFINE), *rules_below("head/", "classifier.", AFFINE)),
    ignored=(POSITION_IDS, r"predictions\..*", r"sop_classifier\..*"),
    **_NAMES,
)
MASKED_LM = masked_lm(
    "AlbertForMaskedLM",
    _settings,
    _config,
    _RULES,
    head=("predictions.dense", "predictions.LayerNorm", "predictions.decoder"),
    ignored=(POSITION_IDS, r"albert\.pooler\..*", r"sop_classifier\..*"),
    head_bias="predictions.bias",
    **_NAMES,
)
