"""Hugging Face's BERT: as a classifier, which needs no head to embed texts, and as a masked language model."""

from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.interop.architecture import Architecture, Settings, our_settings, require, their_fields
from tformer_jax.interop.mapping import AFFINE, NORM, Rule, attention_parts, parts, rules_below

_INPUTS = tuple(f"attention.self.{role}" for role in ("query", "key", "value"))
_LAYER = (
    *attention_parts("self_attention", (*_INPUTS, "attention.output.dense")),
    *parts("self_attention_residual/norm", "attention.output.LayerNorm", NORM),
    *parts("ffn/expand", "intermediate.dense", AFFINE),
    *parts("ffn/contract", "output.dense", AFFINE),
    *parts("ffn_residual/norm", "output.LayerNorm", NORM),
)
_EMBEDDING = "bert.embeddings.word_embeddings.weight"
_ENCODER = (
    Rule("embedding/embedding", _EMBEDDING),
    Rule("input/positions/embedding", "bert.embeddings.position_embeddings.weight"),
    Rule("input/types", "bert.embeddings.token_type_embeddings.weight"),
    *rules_below("input/norm/", "bert.embeddings.LayerNorm.", NORM),
    *rules_below("encoder/layers_{i}/", "bert.encoder.layer.{i}.", _LAYER),
)
_CLASSIFIER = (
    *_ENCODER,
    *rules_below("pooler/", "bert.pooler.dense.", AFFINE),
    *rules_below("head/", "classifier.", AFFINE),
)
_MASKED_LM = (
    *_ENCODER,
    *rules_below("transform/", "cls.predictions.transform.dense.", AFFINE),
    *rules_below("transform_norm/", "cls.predictions.transform.LayerNorm.", NORM),
    Rule("head/bias", "cls.predictions.bias"),
)


_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
    "hidden_size": "dim",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
    "type_vocab_size": "token_types",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_std",
}


def _encoder_settings(hf: Settings) -> Settings:
    require(hf, position_embedding_type="absolute", is_decoder=False)
    return our_settings(_FIELDS, hf) | {
        "norm_placement": "post",
        "position": "learned",
        "embedding_norm": True,
        "scale_embeddings": False,
        "initializer": "normal",
    }


def class_names(hf: Settings) -> dict[Any, Any]:
    """Returns the names of classes by number: `id2label`, or else `num_labels` names as transformers makes them."""
    count = hf.get("num_labels")
    names: dict[Any, Any] = hf.get("id2label") or {i: f"LABEL_{i}" for i in range(2 if count is None else count)}
    return names


def _classifier_settings(hf: Settings) -> Settings:
    head = {"num_classes": len(class_names(hf)), "pooling": "first"}
    return _encoder_settings(hf) | head | {"family": "classifier"}


def _masked_lm_settings(hf: Settings) -> Settings:
    require(hf, tie_word_embeddings=True)
    return _encoder_settings(hf) | {"family": "masked_lm", "head_transform": True}


def _encoder_config(cfg: ModelConfig) -> Settings:
    if not cfg.token_types:
        raise UserError("model_type 'bert' cannot represent this model: model.token_types=0")
    return their_fields(_FIELDS, cfg)


def _classifier_config(cfg: ModelConfig) -> Settings:
    if not cfg.pooler:
        raise UserError("model_type 'bert' cannot represent this model: model.pooler=False")
    labels = {str(label): f"LABEL_{label}" for label in range(cfg.size("num_classes"))}
    return _encoder_config(cfg) | {"id2label": labels}


BERT = Architecture(
    "BertForSequenceClassification",
    _classifier_settings,
    _classifier_config,
    lambda cfg: _CLASSIFIER,
    (r".*position_ids", r"cls\..*"),
    "bert.",
)
BERT_MASKED_LM = Architecture(
    "BertForMaskedLM",
    _masked_lm_settings,
    _encoder_config,
    lambda cfg: _MASKED_LM,
    (r".*position_ids", r"bert\.pooler\..*", r"cls\.seq_relationship\..*"),
    "bert.",
    copies={"cls.predictions.decoder.weight": _EMBEDDING, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    head_bias="cls.predictions.bias",
)
