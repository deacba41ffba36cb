"""A language model of Python source code: the standard library that is running. No files, no network.

python scripts/train.py --config configs/lm_stdlib.py
"""

from ml_collections import ConfigDict

from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict


def get_config() -> ConfigDict:
    """A GPT-2 style decoder of four layers over BPE tokens."""
    return to_config_dict(
        Config(
            name="lm_stdlib",
            model=ModelConfig(
                family="decoder_lm",
                dim=128,
                decoder_layers=4,
                num_heads=4,
                ffn_dim=512,
                max_length=128,
                position="learned",
                activation="gelu_tanh",
                scale_embeddings=False,
                initializer="normal",
                dropout=0.0,
            ),
            data=DataConfig(
                source="stdlib_text",
                tokenizer="bpe",
                vocab_size=2000,
                tokenizer_examples=100,
                batching="windows",
                batch_size=16,
                window=128,
            ),
            optim=OptimConfig(schedule="cosine", learning_rate=2e-3, warmup_steps=100, weight_decay=0.1),
            train=TrainConfig(steps=1000, eval_every=500, checkpoint_every=500),
            eval=EvalConfig(batch_size=32, examples=20, samples=2),
        )
    )
