"""Encoders: classifiers and BERT."""

from tformer_jax.presets.types import Settings

_CLASSIFIER = {
    "family": "classifier",
    "vocab_size": 50_000,
    "num_classes": 2,
    "max_length": 512,
    "dim": 128,
    "encoder_layers": 6,
    "num_heads": 8,
    "ffn_dim": 512,
    "attention_bias": ("output",),
    "norm_placement": "post",
    "position": "learned",
    "tie_embeddings": "none",
    "scale_embeddings": False,
}
_BERT = {
    "family": "classifier",
    "vocab_size": 30_522,
    "num_classes": 2,
    "max_length": 512,
    "dim": 768,
    "encoder_layers": 12,
    "num_heads": 12,
    "ffn_dim": 3072,
    "activation": "gelu",
    "norm_placement": "post",
    "norm_eps": 1e-12,
    "position": "learned",
    "embedding_norm": True,
    "token_types": 2,
    "tie_embeddings": "none",
    "scale_embeddings": False,
    "pooling": "first",
    "pooler": True,
    "attention_dropout": 0.1,
    "initializer": "normal",
}
_BERT_LARGE = {"dim": 1024, "encoder_layers": 24, "num_heads": 16, "ffn_dim": 4096}
_OF_CLASSIFIERS = {"num_classes", "pooling", "pooler"}
_BERT_MLM = {name: value for name, value in _BERT.items() if name not in _OF_CLASSIFIERS} | {
    "family": "masked_lm",
    "tie_embeddings": "output",
    "output_bias": True,
    "head_transform": True,
}

PRESETS: dict[str, Settings] = {
    # of a tutorial on classification
    "sequence_classifier": _CLASSIFIER,
    # "BERT: Pre-training of Deep Bidirectional Transformers" (2019), with a head for two classes, or for masked tokens
    "bert_base": _BERT,
    "bert_large": _BERT | _BERT_LARGE,
    "bert_base_mlm": _BERT_MLM,
    "bert_large_mlm": _BERT_MLM | _BERT_LARGE,
}
