"""Sentiment classification of movie-review sentences (Pang and Lee, 2005).

python scripts/train.py --config configs/classify_rt_polarity.py --data DIR

Embeddings and head learn ten times as fast as the layer, and no norm follows it, so that the length of a vector counts.
"""

from ml_collections import ConfigDict

from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict


def get_config() -> ConfigDict:
    """Returns the config of a small pre-norm encoder over words, without positions, and mean pooling."""
    return to_config_dict(
        Config(
            name="classify_rt_polarity",
            model=ModelConfig(
                family="classifier",
                dim=64,
                encoder_layers=1,
                num_heads=2,
                ffn_dim=128,
                max_length=96,
                final_norm=False,
                position="none",
                scale_embeddings=False,
                initializer="normal",
                dropout=0.5,
                token_dropout=0.3,
            ),
            data=DataConfig(
                source="tsv",
                train="rt_polarity/train.tsv",
                validation="rt_polarity/dev.tsv",
                tokenizer="words",
                vocab_size=20_000,
                bucket_lengths=(24, 48, 96),
                batch_tokens=2048,
            ),
            optim=OptimConfig(
                schedule="cosine",
                learning_rate=1e-3,
                learning_rates=("*embedding=10", "head/*=10"),
                warmup_steps=50,
                final_fraction=0.02,
            ),
            train=TrainConfig(steps=500, eval_every=250, checkpoint_every=500),
            eval=EvalConfig(examples=0),
        )
    )
