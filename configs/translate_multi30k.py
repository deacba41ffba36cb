"""Multi30k captions, English to German, raw text in and out, one shared BPE vocabulary.

python scripts/train.py --config configs/translate_multi30k.py --data DIR
"""

from ml_collections import ConfigDict

from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict


def get_config() -> ConfigDict:
    """A three-layer Transformer that trains on two cores in minutes."""
    return to_config_dict(
        Config(
            name="translate_multi30k",
            model=ModelConfig(
                family="seq2seq",
                dim=256,
                encoder_layers=3,
                decoder_layers=3,
                num_heads=4,
                ffn_dim=512,
                max_length=64,
                tie_embeddings="all",
                dropout=0.1,
            ),
            data=DataConfig(
                source="parallel_lines",
                source_language="en",
                target_language="de",
                train_file="multi30k/train.{lang}.gz",
                validation_file="multi30k/val.{lang}.gz",
                test_file="multi30k/test_2016_flickr.{lang}.gz",
                tokenizer="bpe",
                vocab_size=6000,
                bucket_lengths=(12, 16, 20, 26, 48),
                batch_tokens=2048,
            ),
            optim=OptimConfig(schedule="cosine", learning_rate=1e-3, warmup_steps=300, final_fraction=0.02),
            train=TrainConfig(steps=1200, label_smoothing=0.1, eval_every=1000, checkpoint_every=500),
            eval=EvalConfig(examples=500),
        )
    )
