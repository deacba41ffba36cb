"""Sizes of a model that are known from the config, before any data is read."""

from tformer_jax.config.model import ModelConfig
from tformer_jax.config.schema import Config

UNKNOWN = {"characters": ("the characters of the text", 100), "file": ("data.tokenizer_file", 32000)}
"""Kinds of tokenizers whose vocabulary is unknown before training: what its size depends on, and an example of it."""


def with_sizes(config: Config) -> ModelConfig:
    """Returns the model config with vocabulary sizes and number of classes as in training; labels of files count as 2.

    Raises:
        ConfigError: a vocabulary depends on the data or on a file, and its size is not set.
    """
    cfg = config.model
    source, target = config.data.tokenizer_kinds
    sides = {"vocab_size": target, "source_vocab_size": source} if cfg.family == "seq2seq" else {"vocab_size": source}
    sizes = {name: _vocabulary(config, name, kind) for name, kind in sides.items() if getattr(cfg, name) is None}
    if cfg.family == "classifier" and cfg.num_classes is None:
        sizes["num_classes"] = len(config.data.languages) if config.data.source == "cldr_language" else 2
    return ModelConfig(**{**vars(cfg), **sizes})


def _vocabulary(config: Config, name: str, kind: str) -> int:
    """Returns the size of the vocabulary of a tokenizer of this kind, which the model's setting `name` is to have."""
    if kind in UNKNOWN:
        reason, example = UNKNOWN[kind]
        raise config.model.error(name, f"depends on {reason}; add --config.model.{name}={example} or so")
    return 260 if kind == "bytes" else config.data.vocab_size
