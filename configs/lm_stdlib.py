"""Language model of Python source code: the running Python's standard library; needs no files and no network.

python scripts/train.py --config configs/lm_stdlib.py
python scripts/train.py --config configs/lm_stdlib.py:gpt2 (any decoder_lm preset)

The text depends on the version of Python, so no result is recorded.
"""

from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict

SMALL = {
    "family": "decoder_lm",
    "dim": 128,
    "decoder_layers": 4,
    "num_heads": 4,
    "ffn_dim": 512,
    "max_length": 128,
    "position": "learned",
    "activation": "gelu_tanh",
    "scale_embeddings": False,
    "initializer": "normal",
    "dropout": 0.0,
}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of a four-layer GPT-2-style decoder over BPE tokens, or of the preset `variant`."""
    architecture = presets.of_variant("configs/lm_stdlib.py", variant, ("decoder_lm",)) if variant else SMALL
    return to_config_dict(
        Config(
            name=f"lm_stdlib_{variant}" if variant else "lm_stdlib",
            model=ModelConfig(**architecture),
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
