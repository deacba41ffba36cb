"""Building blocks of Transformers: pure functions of arrays, and thin Linen modules that own their parameters."""

from tformer_jax import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(("Attention", "BasicAttention"), "tformer_jax.nn.attention"),
        **dict.fromkeys(("FFN", "GatedFFN"), "tformer_jax.nn.ffn"),
        **dict.fromkeys(("InputEmbedding", "OutputHead", "TokenEmbedding"), "tformer_jax.nn.embeddings"),
        **dict.fromkeys(("LayerNorm", "RMSNorm"), "tformer_jax.nn.norms"),
        **dict.fromkeys(("Decoder", "Encoder"), "tformer_jax.nn.stacks"),
        "GatedDelta": "tformer_jax.nn.gated_delta",
        "LatentAttention": "tformer_jax.nn.latent_attention",
        "Linear": "tformer_jax.nn.linear",
        "MixtureOfExperts": "tformer_jax.nn.moe",
    },
)
