"""Data and optimizer settings that several configs share."""

from tformer_jax.config import DataConfig, OptimConfig

TINY_SHAKESPEARE = DataConfig(
    source="text",
    train="tiny_shakespeare/input.txt",
    tokenizer="characters",
    batching="windows",
    batch_size=12,
    window=64,
)
RT_POLARITY = DataConfig(
    source="tsv",
    train="rt_polarity/train.tsv",
    validation="rt_polarity/dev.tsv",
    bucket_lengths=(24, 40, 96),
    batch_tokens=2048,
)
TATOEBA = DataConfig(
    source="tsv",
    source_language="en",
    target_language="zh",
    train="tatoeba_en_zh/train.tsv",
    validation="tatoeba_en_zh/dev.tsv",
    target_tokenizer="characters",
    vocab_size=4000,
    shared_vocab=False,
    bucket_lengths=(12, 20, 64),
    batch_tokens=2048,
)
MULTI30K = DataConfig(
    source="parallel_lines",
    source_language="en",
    target_language="de",
    train="multi30k/train.{lang}.gz",
    validation="multi30k/val.{lang}.gz",
    test="multi30k/test_2016_flickr.{lang}.gz",
    vocab_size=6000,
    bucket_lengths=(16, 24, 48),
    batch_tokens=2048,
)
MUON = OptimConfig(optimizer="muon", schedule="cosine", learning_rate=5e-3, warmup_steps=100, final_fraction=0.0)
