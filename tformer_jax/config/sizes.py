"""Sizes of a model that are known from the config, before any data is read."""

from tformer_jax.config import kinds
from tformer_jax.config.model import ModelConfig
from tformer_jax.config.schema import Config
from tformer_jax.special_tokens import SPECIAL_TOKENS

UNKNOWN = {"characters": ("the characters of the text", 100), "file": ("data.tokenizer_file", 32000)}
"""Kinds of tokenizers whose vocabulary is unknown before training: what its size depends on, and an example of it."""
BYTES = 256 + len(SPECIAL_TOKENS)
"""Size of the vocabulary of the tokenizer `bytes`."""
ASSUMED_CLASSES = 2
"""Number of classes to assume where it depends on data that is not read."""


def with_sizes(config: Config) -> ModelConfig:
    """Returns the model config with vocabulary sizes and number of classes as in training, as far as they are known.

    The vocabulary of a trained tokenizer has its maximum size; `assumption` says whether the number of classes is
    assumed.

    Raises:
        ConfigError: a vocabulary depends on the data or on a file, and its size is not set.
    """
    cfg = config.model
    source, target = config.data.tokenizer_kinds
    if config.data.objective is not None:
        target = source  # texts have one tokenizer
    sides = (
        {"vocab_size": target, "source_vocab_size": source} if cfg.model_class.reads_source else {"vocab_size": source}
    )
    sizes = {name: _vocabulary(config, name, kind) for name, kind in sides.items() if getattr(cfg, name) is None}
    if cfg.model_class.classifies and cfg.num_classes is None:
        from_settings = config.data.source == "cldr_language"
        sizes["num_classes"] = len(config.data.languages) if from_settings else ASSUMED_CLASSES
    return ModelConfig(**{**vars(cfg), **sizes})


def assumption(config: Config) -> str | None:
    """Returns a sentence about the number of classes if `with_sizes` assumes it."""
    cfg = config.model
    if not cfg.model_class.classifies or cfg.num_classes is not None or config.data.source == "cldr_language":
        return None
    return f"{ASSUMED_CLASSES} classes are assumed, as the data is not read: add --config.model.num_classes=N"


def _vocabulary(config: Config, name: str, kind: str) -> int:
    """Returns the size of the vocabulary of a tokenizer of this kind, which the model's setting `name` is to have."""
    if kind in UNKNOWN:
        reason, example = UNKNOWN[kind]
        raise config.model.error(name, f"depends on {reason}; add, for example, --config.model.{name}={example}")
    size = BYTES if kind == "bytes" else config.data.vocab_size
    objective = config.data.objective
    return size if objective is None else size + len(kinds.load(kinds.OBJECTIVES, objective).added)
