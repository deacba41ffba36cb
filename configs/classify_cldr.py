"""Language identification of generated CLDR phrases (dates, numbers, names); needs no files and no network.

python scripts/train.py --config configs/classify_cldr.py
python scripts/train.py --config configs/classify_cldr.py:sequence_classifier (any classifier preset)
"""

from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict

SMALL = {
    "family": "classifier",
    "dim": 64,
    "encoder_layers": 2,
    "num_heads": 4,
    "ffn_dim": 128,
    "max_length": 128,
    "position": "learned",
    "dropout": 0.0,
}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of a small encoder over bytes, or of the preset `variant`."""
    architecture = presets.of_variant("configs/classify_cldr.py", variant, ("classifier",)) if variant else SMALL
    return to_config_dict(
        Config(
            name=f"classify_cldr_{variant}" if variant else "classify_cldr",
            model=ModelConfig(**architecture),
            data=DataConfig(
                source="cldr_language",
                heldout_examples=1000,
                tokenizer="bytes",
                bucket_lengths=(16, 32, 128),
                batch_tokens=4096,
            ),
            optim=OptimConfig(schedule="cosine", learning_rate=2e-3, warmup_steps=100),
            train=TrainConfig(steps=600, eval_every=300, checkpoint_every=300),
        )
    )
