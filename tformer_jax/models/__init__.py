"""The model families, assembled from the modules of `nn`.

`build` makes the Linen module of a `ModelConfig`, `init` its parameters, and `forward` runs it on a batch.
"""

from tformer_jax import lazy_names

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
