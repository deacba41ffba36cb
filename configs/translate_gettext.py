"""Translation of the messages of software: Django's catalogues, English to and from eight languages in one model.

pip install django
python scripts/train.py --config configs/translate_gettext.py
python scripts/train.py --config configs/translate_gettext.py:smoke     (a tiny model of two languages)

No data folder and no network are needed: the messages are those of the installed package. Another package, or a folder
of catalogues of your own, is a value of `data.train`, and its languages are those of `data.directions`; () stands for
English to and from every language with at least 100 messages. The same messages in several languages are pairs of any
two of them: de-fr and fr-de are scored without being trained. A tenth of the messages is for validation and another for
the test, in all languages.

Placeholders of `%`-formatting, `str.format` and templates, HTML tags and addresses are symbols for the model, which
outputs copy from their source (`data.placeholders`); 22 % of the test messages have some.
"""

import dataclasses

from bases import MUON
from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, ModelConfig, TrainConfig, to_config_dict

LANGUAGES = ("de", "fr", "es", "it", "nl", "pt_BR", "sv", "pl")
MESSAGES = Config(
    name="translate_gettext",
    model=ModelConfig(
        family="seq2seq",
        dim=128,
        encoder_layers=3,
        decoder_layers=3,
        num_heads=4,
        ffn_dim=344,
        max_length=192,
        tie_embeddings="all",
        dropout=0.2,
        **presets.LAYERS_OF_QWEN3,
    ),
    data=DataConfig(
        source="gettext",
        train="django",
        directions=tuple(f"en-{language}" for language in LANGUAGES),
        both_directions=True,
        zero_shot=("de-fr", "fr-de"),
        placeholders=("percent", "braces", "tags", "urls"),
        tokenizer="bpe",
        vocab_size=3000,
        bucket_lengths=(5, 8, 12, 18, 27, 40, 60, 136),
        batch_tokens=2048,
    ),
    optim=MUON,
    train=TrainConfig(steps=1500, label_smoothing=0.1, eval_every=750, checkpoint_every=500),
    decode=DecodeConfig(strategy="beam", beams=4),
    eval=EvalConfig(examples=200),
)
SMOKE = dataclasses.replace(
    MESSAGES,
    name="translate_gettext_smoke",
    model=dataclasses.replace(MESSAGES.model, dim=32, encoder_layers=1, decoder_layers=1, ffn_dim=64),
    data=dataclasses.replace(
        MESSAGES.data, directions=("en-de", "en-fr"), zero_shot=(), vocab_size=1000, bucket_lengths=(20, 140)
    ),
    optim=dataclasses.replace(MUON, warmup_steps=3),
    train=TrainConfig(steps=30, label_smoothing=0.1, eval_every=30, checkpoint_every=30),
    decode=DecodeConfig(max_new_tokens=20),
    eval=EvalConfig(examples=40),
)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of all languages, or of a model for trials."""
    if variant not in ("", "smoke"):
        raise UserError(f"variant {variant!r} of configs/translate_gettext.py: write 'smoke', or no variant")
    return to_config_dict(SMOKE if variant else MESSAGES)
