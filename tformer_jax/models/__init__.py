"""The model families, assembled from the modules of `nn`.

`build` makes the Linen module of a `ModelConfig`, `init` its parameters, and `forward` runs it on a batch.
"""

from collections.abc import Mapping
from typing import Any

from tformer_jax import lazy_names

Batch = Mapping[str, Any]
"""What models read: arrays by key, such as int32 `tokens` [batch, tokens]."""

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(("build", "forward", "init", "shapes"), "tformer_jax.models.registry"),
        "Classifier": "tformer_jax.models.classifier",
        "DecoderLM": "tformer_jax.models.decoder_lm",
        "MaskedLM": "tformer_jax.models.masked_lm",
        "Seq2Seq": "tformer_jax.models.seq2seq",
    },
)
