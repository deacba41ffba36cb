"""Translation of Multi30k captions, English to German, from raw text, with a shared BPE vocabulary.

python scripts/train.py --config configs/translate_multi30k.py --data DIR
python scripts/train.py --config configs/translate_multi30k.py:t5_v1_1_small --data DIR     (any seq2seq of presets.py)
"""

from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict

SMALL = {
    "family": "seq2seq",
    "dim": 256,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "num_heads": 4,
    "ffn_dim": 512,
    "max_length": 64,
    "tie_embeddings": "all",
    "dropout": 0.1,
}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of a three-layer Transformer, sized for two CPU cores, or of the preset `variant`."""
    return to_config_dict(
        Config(
            name=f"translate_multi30k_{variant}" if variant else "translate_multi30k",
            model=ModelConfig(**presets.for_data(variant) if variant else SMALL),
            data=DataConfig(
                source="parallel_lines",
                source_language="en",
                target_language="de",
                train="multi30k/train.{lang}.gz",
                validation="multi30k/val.{lang}.gz",
                test="multi30k/test_2016_flickr.{lang}.gz",
                tokenizer="bpe",
                vocab_size=6000,
                bucket_lengths=(10, 12, 13, 14, 15, 16, 17, 19, 21, 23, 26, 30, 36, 48),
                batch_tokens=2048,
            ),
            optim=OptimConfig(schedule="cosine", learning_rate=1e-3, warmup_steps=300, final_fraction=0.02),
            train=TrainConfig(steps=1200, label_smoothing=0.1, eval_every=1000, checkpoint_every=500),
            eval=EvalConfig(examples=500),
        )
    )
