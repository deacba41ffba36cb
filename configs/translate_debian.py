r"""Translation of Debian's package descriptions: English to and from 15 languages in one model, with language tags.

python scripts/train.py --config configs/translate_debian.py --data DIR
python scripts/train.py --config configs/translate_debian.py:en-de --data DIR     (one direction, 1/30 of the steps)
python scripts/train.py --config configs/translate_debian.py:smoke --data DIR     (a tiny model of two languages)

The data is `debian_descriptions/train.tsv.gz` and `dev.tsv.gz`: source language<tab>target language<tab>English<tab>
translation. The directions are those of the languages with 2,000 pairs or more; the smallest has 2,406 (zh_CN), the
largest 100,126 (it). With a temperature of 5, a direction of Italian is drawn twice as often as one of Chinese, instead
of 42 times. The size, the vocabulary and the number of steps are meant for 40 minutes on two cores of an AMD EPYC of
the Zen 4 generation, in which 190,000 pairs are drawn: each of Italian 0.1 times, of Chinese 1.8 times. With 8,000
tokens, 0.3 % of the pairs are longer than 160 tokens, and dropped.

Descriptions with equal English are a test set of directions that training lacks, such as 633 pairs of de-fr:

(printf 'source_language\ttarget_language\tsource\ttarget\n'; zcat DIR/debian_descriptions/dev.tsv.gz | awk -F '\t' '
  $2 == "de" {de[$3] = $4} $2 == "fr" {fr[$3] = $4}
  END {for (text in de) if (text in fr) print "de\tfr\t" de[text] "\t" fr[text]}' | sort) > de-fr.tsv
python scripts/evaluate.py --run runs/translate_debian --source de-fr.tsv \
  --language-fields source_language target_language

To train on another release of Debian, make the pairs of apt's lists with TFDS, as configs/README.md says, and set
`data.source="tfds"`, `data.dataset="debian_descriptions"`, `data.train="train"`, `data.validation="validation"`,
`data.fields=("source", "target")` and `data.language_fields=("source_language", "target_language")`.
"""

import dataclasses

from bases import MUON
from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, ModelConfig, TrainConfig, to_config_dict

LANGUAGES = ("it", "da", "fr", "de", "sk", "pt_BR", "ja", "ko", "uk", "pl", "ru", "cs", "es", "pt", "zh_CN")
STEPS = 2400
MULTILINGUAL = Config(
    name="translate_debian",
    model=ModelConfig(
        family="seq2seq",
        dim=160,
        encoder_layers=3,
        decoder_layers=3,
        num_heads=4,
        ffn_dim=432,
        max_length=256,
        tie_embeddings="all",
        dropout=0.0,
        **presets.LAYERS_OF_QWEN3,
    ),
    data=DataConfig(
        source="tsv",
        train="debian_descriptions/train.tsv.gz",
        validation="debian_descriptions/dev.tsv.gz",
        fields=("3", "4"),
        language_fields=("1", "2"),
        directions=tuple(f"en-{language}" for language in LANGUAGES),
        both_directions=True,
        temperature=5.0,
        tokenizer="bpe",
        vocab_size=8000,
        bucket_lengths=(17, 23, 30, 40, 53, 68, 85, 106, 130, 160),
        batch_tokens=4096,
    ),
    optim=MUON,
    train=TrainConfig(steps=STEPS, label_smoothing=0.1, eval_every=STEPS // 2, checkpoint_every=STEPS // 8),
    decode=DecodeConfig(strategy="beam", beams=4),
    eval=EvalConfig(examples=300),
)
DIRECTIONS = tuple(name for language in LANGUAGES for name in (f"en-{language}", f"{language}-en"))


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of all directions, of one of them with its share of the steps, or of a model for trials."""
    cfg = MULTILINGUAL
    if variant in DIRECTIONS:
        steps = STEPS // len(DIRECTIONS)
        data = dataclasses.replace(cfg.data, directions=(variant,), both_directions=False, temperature=1.0)
        train = dataclasses.replace(cfg.train, steps=steps, eval_every=steps, checkpoint_every=steps)
        optim = dataclasses.replace(cfg.optim, warmup_steps=steps // 10)
        cfg = dataclasses.replace(cfg, data=data, train=train, optim=optim)
    elif variant == "smoke":
        model = dataclasses.replace(cfg.model, dim=32, encoder_layers=1, decoder_layers=1, ffn_dim=64)
        data = dataclasses.replace(
            cfg.data,
            directions=("en-pt", "en-zh_CN"),
            vocab_size=1000,
            tokenizer_examples=5000,
            bucket_lengths=(40, 160),
        )
        train = dataclasses.replace(cfg.train, steps=30, eval_every=30, checkpoint_every=30)
        eval_cfg = dataclasses.replace(cfg.eval, examples=60)
        decode = DecodeConfig(max_new_tokens=20)
        optim = dataclasses.replace(cfg.optim, warmup_steps=3)
        cfg = dataclasses.replace(cfg, model=model, data=data, optim=optim, train=train, eval=eval_cfg, decode=decode)
    elif variant:
        raise UserError(
            f"variant {variant!r} of configs/translate_debian.py: write one of {', '.join(DIRECTIONS)}, or 'smoke'"
        )
    name = "_".join(filter(None, (cfg.name, variant.replace("-", "_"))))
    return to_config_dict(dataclasses.replace(cfg, name=name))
