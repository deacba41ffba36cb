"""Translation of Tatoeba sentences, English to Chinese, with separate vocabularies.

python scripts/train.py --config configs/translate_tatoeba_zh.py --data DIR
"""

from ml_collections import ConfigDict

from tformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict


def get_config() -> ConfigDict:
    """Returns the config of a post-norm RMSNorm model without biases; BLEU is computed on Chinese characters."""
    return to_config_dict(
        Config(
            name="translate_tatoeba_zh",
            model=ModelConfig(
                family="seq2seq",
                dim=256,
                encoder_layers=2,
                decoder_layers=3,
                num_heads=4,
                ffn_dim=512,
                max_length=64,
                norm="rmsnorm",
                norm_placement="post",
                activation="silu",
                attention_bias=(),
                ffn_bias=False,
                tie_embeddings="none",
                output_bias=True,
                dropout=0.2,
            ),
            data=DataConfig(
                source="tsv",
                source_language="en",
                target_language="zh",
                train="tatoeba_en_zh/train.tsv",
                validation="tatoeba_en_zh/dev.tsv",
                tokenizer="bpe",
                vocab_size=5000,
                shared_vocab=False,
                bucket_lengths=(12, 20, 64),
                batch_tokens=2048,
            ),
            optim=OptimConfig(schedule="cosine", learning_rate=7e-4, warmup_steps=300, final_fraction=0.02),
            train=TrainConfig(steps=1500, label_smoothing=0.1, eval_every=500, checkpoint_every=500),
        )
    )
