"""Sentiment classification of movie-review sentences (Pang and Lee, 2005).

python scripts/train.py --config configs/classify_rt_polarity.py --data DIR

Expect an accuracy of 76.0 % (standard deviation 0.6 over five seeds) on dev.tsv after 500 steps, half a minute on two
CPU cores. The CNN without pre-trained embeddings of Kim (2014) has 76.1 %, in ten-fold cross-validation.

The model is a bag of words, as in fastText (Joulin et al., 2017). It was chosen without dev.tsv, by the accuracy on
held-out fifths of the shuffled train.tsv. On four of them, trials of a bag of words had 77.1 %, with bigrams 77.1 %,
with only the 8,000 most frequent words 76.6 %, and with one pre-norm layer 75.8 %. On one fifth, this bag of words has
76.6 % over three seeds.
"""

from ml_collections import ConfigDict

from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict


def get_config() -> ConfigDict:
    """Returns the config of a classifier of the mean of word embeddings."""
    return to_config_dict(
        Config(
            name="classify_rt_polarity",
            model=ModelConfig(
                family="classifier",
                dim=64,
                encoder_layers=0,
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
                learning_rate=1e-2,
                warmup_steps=50,
                final_fraction=0.02,
            ),
            train=TrainConfig(steps=500, eval_every=250, checkpoint_every=500),
            eval=EvalConfig(examples=0),
        )
    )
