"""A tokenizer that is trained on a few texts."""

from collections.abc import Iterable
from typing import Any

from tformer_jax.config import DataConfig
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers


def trained_tokenizer(kind: str, texts: Iterable[str], vocab_size: int, **settings: Any) -> Tokenizer:
    """Trains a tokenizer on texts, which it does not normalize."""
    cfg = DataConfig(tokenizer=kind, vocab_size=vocab_size, **settings)
    return train_tokenizers(cfg, [{"text": text} for text in texts]).target
