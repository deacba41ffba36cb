"""Pre-training on Python source code, the running Python's standard library; needs no files and no network.

python scripts/train.py --config configs/pretrain_stdlib.py                      (masked tokens, as BERT)
python scripts/train.py --config configs/pretrain_stdlib.py:span_corruption      (as T5)
python scripts/train.py --config configs/pretrain_stdlib.py:denoising            (as BART)
python scripts/train.py --config configs/pretrain_stdlib.py:bert_base_mlm (or the preset of a T5 or BART)

The text depends on the version of Python, so no result is recorded.
"""

from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.config import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    NoiseConfig,
    OptimConfig,
    TrainConfig,
    to_config_dict,
)

SMALL = {
    "dim": 128,
    "num_heads": 4,
    "ffn_dim": 512,
    "max_length": 128,
    "position": "learned",
    "activation": "gelu",
    "tie_embeddings": "output",
    "scale_embeddings": False,
    "initializer": "normal",
    "dropout": 0.0,
}
ENCODER = SMALL | {"family": "masked_lm", "encoder_layers": 4, "head_transform": True, "output_bias": True}
ENCODER_DECODER = SMALL | {"encoder_layers": 2, "decoder_layers": 2, "tie_embeddings": "all"}
ARCHITECTURES = {"masked_tokens": ENCODER, "span_corruption": ENCODER_DECODER, "denoising": ENCODER_DECODER}
NOISE = {
    "masked_tokens": NoiseConfig(),
    "span_corruption": NoiseConfig(),
    "denoising": NoiseConfig(density=0.3, permute_sentences=True),
}


def get_config(variant: str = "masked_tokens") -> ConfigDict:
    """Returns the config of a small model with the objective `variant`, or of the preset `variant` with its own."""
    location, others = "configs/pretrain_stdlib.py", ", ".join(ARCHITECTURES)
    architecture = ARCHITECTURES.get(variant) or presets.of_variant(location, variant, ("masked_lm", "seq2seq"), others)
    if variant in ARCHITECTURES:
        objective = variant
    elif architecture.get("family") == "masked_lm":
        objective = "masked_tokens"
    else:
        objective = "denoising" if variant.startswith("bart") else "span_corruption"
    return to_config_dict(
        Config(
            name=f"pretrain_stdlib_{variant}",
            model=ModelConfig(**architecture),
            data=DataConfig(
                source="stdlib_text",
                objective=objective,
                noise=NOISE[objective],
                tokenizer="bpe",
                vocab_size=2000,
                tokenizer_examples=100,
                batching="windows",
                batch_size=16,
                window=128,
            ),
            optim=OptimConfig(schedule="cosine", learning_rate=2e-3, warmup_steps=100, weight_decay=0.1),
            train=TrainConfig(steps=1000, eval_every=500, checkpoint_every=500),
            eval=EvalConfig(batch_size=32, examples=20),
        )
    )
