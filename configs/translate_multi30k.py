"""Translation of Multi30k captions, by default English to German, with a shared BPE vocabulary.

python scripts/train.py --config configs/translate_multi30k.py --data DIR              (raw text)
python scripts/train.py --config configs/translate_multi30k.py:en-fr --data DIR        (or de-en, ...)
python scripts/train.py --config configs/translate_multi30k.py:many --data DIR         (all six directions)
python scripts/train.py --config configs/translate_multi30k.py:baseline --data DIR     (sinusoids, ReLU, AdamW)
python scripts/train.py --config configs/translate_multi30k.py:published --data DIR
python scripts/train.py --config configs/translate_multi30k.py:diversified --data DIR
python scripts/train.py --config configs/translate_multi30k.py:bidirectional --data DIR
python scripts/train.py --config configs/translate_multi30k.py:student --data DIR      (a quarter of the parameters)
python scripts/train.py --config configs/translate_multi30k.py:distilled --data DIR    (taught by the first run)
python scripts/train.py --config configs/translate_multi30k.py:t5_v1_1_small --data DIR (any seq2seq preset)

On raw text expect a cased BLEU of 37.8 on test_2016_flickr after 15 to 20 minutes on two CPU cores, 41.3 from German
to English, and 57.7 from English to French.

`many` is one model of all six directions, with language tags, trained for six times the steps of one direction, in 63
minutes on an AMD EPYC of the Zen 5 generation (3,397 steps on one core, the others on two). The dropout of 0.1 was
chosen on the validation split (BLEU 44.0; 39.8 with 0.2). configs/README.md has its scores, and those of single
directions.

`published` is the setting of Transformer-Tiny in "Good for Misconceived Reasons: An Empirical Revisiting on the Need
for Visual Context in Multimodal Machine Translation" (2021): lower-cased, normalized and tokenized text, joint BPE,
four layers of width 128 on each side, dropout of 0.3, averaged checkpoints, beam width 5, BLEU on tokens. It needs
`pip install -e ".[tokenizers]"`. The layers (Qwen3's, with FFNs of as many parameters as the paper's), Muon, a label
smoothing of 0.2 (the paper's is 0.1) and a vocabulary of 6,000 (10,000) differ from the paper. Expect a BLEU of 40.4 on
test_2016_flickr (three seeds: 40.8, 39.8, 40.7) after 44 to 64 minutes on one core of an AMD EPYC of the Zen 5
generation; the paper has 41.0.

`diversified` is `published` with three times as many pairs ("Data Diversification: A Simple Strategy For Neural Machine
Translation", 2020): the training split, its English with the translation of a run of `en-de` (`forward`), and its
German with that of a run of `de-en` (`backward`). One seed had a BLEU of 41.2 on test_2016_flickr after 72 minutes on
one core of an AMD EPYC of the Zen 5 generation, beside other work, and about 45 more for the two runs and the
translations.

`bidirectional` is `published`, starting from a run of `both_directions`, which learns to translate English to German
and German to English ("Improving Neural Machine Translation by Bidirectional Training", 2021). Expect a BLEU
of 41.1 on test_2016_flickr (three seeds: 41.0, 40.7, 41.7) after 48 minutes on two cores of an AMD EPYC of the Zen 5
generation: 12 for the first stage, which the three seeds share, and 36 for the second.

`distilled` is `student` with the distributions of the run `runs/translate_multi30k` beside the labels (2015). It needs
that run; both have the same vocabulary, which is trained on the same text.

configs/README.md shows the commands that make the data of `diversified` and `both_directions`, and by which trials on
the validation split these settings were chosen.
"""

import dataclasses
import re
from pathlib import Path

from bases import MULTI30K, MUON
from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    to_config_dict,
)

DATA = dataclasses.replace(
    MULTI30K,
    tokenizer="bpe",
    bucket_lengths=(10, 12, 13, 14, 15, 16, 17, 19, 21, 23, 26, 30, 36, 48),
)
SMALL = Config(
    name="translate_multi30k",
    model=ModelConfig(
        family="seq2seq",
        dim=192,
        encoder_layers=3,
        decoder_layers=3,
        num_heads=4,
        ffn_dim=512,
        max_length=64,
        tie_embeddings="all",
        dropout=0.2,
        **presets.LAYERS_OF_QWEN3,
    ),
    data=DATA,
    optim=MUON,
    train=TrainConfig(steps=1500, label_smoothing=0.1, eval_every=1000, checkpoint_every=500),
    decode=DecodeConfig(strategy="beam", beams=5),
    eval=EvalConfig(examples=200),
)
MANY = dataclasses.replace(
    SMALL,
    name="translate_multi30k_many",
    model=dataclasses.replace(SMALL.model, dropout=0.1),
    data=dataclasses.replace(DATA, directions=("en-de", "en-fr", "de-fr"), both_directions=True),
    train=dataclasses.replace(SMALL.train, steps=6 * SMALL.train.steps),
)
STUDENT = dataclasses.replace(
    SMALL,
    name="translate_multi30k_student",
    model=dataclasses.replace(SMALL.model, dim=80, ffn_dim=240, dropout=0.1),
)
DISTILLED = dataclasses.replace(
    STUDENT,
    name="translate_multi30k_distilled",
    train=dataclasses.replace(SMALL.train, teacher=f"runs/{SMALL.name}", teacher_weight=0.5, teacher_temperature=2.0),
)
BASELINE = dataclasses.replace(
    SMALL,
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
    optim=OptimConfig(schedule="cosine", learning_rate=1e-3, warmup_steps=300, final_fraction=0.02),
    train=dataclasses.replace(SMALL.train, steps=1200),
)
PUBLISHED = dataclasses.replace(
    BASELINE,
    name="translate_multi30k_published",
    # three FFN matrices of width 176 have the parameters of two of width 256
    model=dataclasses.replace(SMALL.model, dim=128, encoder_layers=4, decoder_layers=4, ffn_dim=176, dropout=0.3),
    data=dataclasses.replace(
        DATA,
        normalize=("punctuation", "lowercase", "moses"),
        bucket_lengths=(12, 15, 18, 23, 30, 48),
        batch_tokens=4096,
    ),
    optim=dataclasses.replace(SMALL.optim, warmup_steps=200),
    train=dataclasses.replace(
        SMALL.train,
        steps=5000,
        label_smoothing=0.2,
        checkpoint_every=100,
        keep_checkpoints=8,
        weights="average_last",
        average=8,
    ),
    eval=EvalConfig(references="normalized", bleu_tokenize="none"),
)
DIVERSIFIED = dataclasses.replace(
    PUBLISHED,
    name="translate_multi30k_diversified",
    model=dataclasses.replace(PUBLISHED.model, dropout=0.2),
    data=dataclasses.replace(
        PUBLISHED.data,
        train=tuple(f"multi30k/{name}.{{lang}}.gz" for name in ("train", "forward", "backward")),
    ),
    train=dataclasses.replace(PUBLISHED.train, steps=6000),
)
BOTH_DIRECTIONS = dataclasses.replace(
    PUBLISHED,
    name="translate_multi30k_both_directions",
    data=dataclasses.replace(
        PUBLISHED.data, train=tuple(f"multi30k/{name}.{{lang}}.gz" for name in ("train", "reversed"))
    ),
    optim=OptimConfig(optimizer="muon", schedule="constant", learning_rate=5e-3, warmup_steps=200),
    train=dataclasses.replace(SMALL.train, steps=2000, label_smoothing=PUBLISHED.train.label_smoothing),
)
FIRST_STAGE = f"runs/{BOTH_DIRECTIONS.name}"
BIDIRECTIONAL = dataclasses.replace(
    PUBLISHED,
    name="translate_multi30k_bidirectional",
    data=dataclasses.replace(
        PUBLISHED.data,
        tokenizer="file",
        tokenizer_file=str(Path(FIRST_STAGE).resolve()),
        vocab_size=DataConfig.vocab_size,
    ),
    train=dataclasses.replace(PUBLISHED.train, steps=7000, start_from=FIRST_STAGE),
)
VARIANTS = {
    "student": STUDENT,
    "distilled": DISTILLED,
    "published": PUBLISHED,
    "diversified": DIVERSIFIED,
    "both_directions": BOTH_DIRECTIONS,
    "bidirectional": BIDIRECTIONAL,
}
OTHER_VARIANTS = f"two of en, de and fr, such as de-en, or many, baseline, {', '.join(VARIANTS)}"


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of a language pair, of a variant, or of a preset."""
    if variant in VARIANTS:
        return to_config_dict(VARIANTS[variant])
    name = f"{SMALL.name}_{variant.replace('-', '_')}" if variant else SMALL.name
    pair = re.fullmatch("(en|de|fr)-(en|de|fr)", variant)
    if pair and pair[1] != pair[2]:
        data = dataclasses.replace(DATA, source_language=pair[1], target_language=pair[2])
        return to_config_dict(dataclasses.replace(SMALL, name=name, data=data))
    if variant in ("", "many"):
        return to_config_dict(MANY if variant else SMALL)
    if variant == "baseline":
        return to_config_dict(dataclasses.replace(BASELINE, name=name))
    architecture = presets.of_variant("configs/translate_multi30k.py", variant, ("seq2seq",), OTHER_VARIANTS)
    return to_config_dict(dataclasses.replace(BASELINE, name=name, model=ModelConfig(**architecture)))
