"""Character-level language model of Tiny Shakespeare.

python scripts/train.py --config configs/lm_tiny_shakespeare.py:cpu --data DIR
"""

from ml_collections import ConfigDict

from tformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    to_config_dict,
)

VARIANTS = {
    # layers, heads, width, context, batch size, steps, dropout: nanoGPT's two published settings
    "cpu": (4, 4, 128, 64, 12, 2000, 0.0),
    "gpu": (6, 6, 384, 256, 64, 5000, 0.2),
}


def get_config(variant: str = "cpu") -> ConfigDict:
    """Returns the config of a GPT-2-style decoder of size `variant`."""
    if variant not in VARIANTS:
        raise ConfigError(f"variant {variant!r} of configs/lm_tiny_shakespeare.py: write one of {', '.join(VARIANTS)}")
    layers, heads, dim, context, batch_size, steps, dropout = VARIANTS[variant]
    return to_config_dict(
        Config(
            name=f"lm_tiny_shakespeare_{variant}",
            model=ModelConfig(
                family="decoder_lm",
                decoder_layers=layers,
                num_heads=heads,
                dim=dim,
                ffn_dim=4 * dim,
                max_length=context,
                position="learned",
                activation="gelu",
                attention_bias=(),
                ffn_bias=False,
                norm_bias=False,
                scale_embeddings=False,
                initializer="normal",
                dropout=dropout,
                attention_dropout=dropout,
            ),
            data=DataConfig(
                source="text",
                train="tiny_shakespeare/input.txt",
                tokenizer="characters",
                batching="windows",
                batch_size=batch_size,
                window=context,
            ),
            optim=OptimConfig(
                schedule="cosine", learning_rate=2e-3, warmup_steps=100, beta2=0.99, eps=1e-8, weight_decay=0.1
            ),
            train=TrainConfig(steps=steps, eval_every=500, checkpoint_every=500),
            eval=EvalConfig(batch_size=128),
        )
    )
