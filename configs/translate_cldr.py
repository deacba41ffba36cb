"""Translation of generated CLDR phrases (dates, numbers, currencies, units, names); needs no files and no network.

python scripts/train.py --config configs/translate_cldr.py
python scripts/train.py --config configs/translate_cldr.py:en-zh     (any two CLDR locales)
python scripts/train.py --config configs/translate_cldr.py:noisy     (en-de, with noise in the sources)

Expect about 98 % exact matches on the held-out phrases after two to three minutes on two CPU cores. The
learning rate, the batch size and the number of steps were compared by the validation split of en-de.
"""

from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict

NOISE = (
    {"kind": "case", "sides": ("source",), "form": "upper", "probability": 0.1},
    {"kind": "case", "sides": ("source",), "form": "lower", "probability": 0.1},
    {"kind": "spacing", "rate": 0.2, "probability": 0.2},
    {"kind": "typos", "rate": 0.3, "probability": 0.3},
)
"""Of `:noisy`; `python -m tests.programs.noise` compares its runs with those without."""


def get_config(variant: str = "en-de") -> ConfigDict:
    """Returns the config of a small model that translates from the first locale of `variant` to the second."""
    noisy = variant == "noisy"
    source, dash, target = ("en-de" if noisy else variant).partition("-")
    if not (source and dash and target):
        raise UserError(f"variant {variant!r} of configs/translate_cldr.py: write two CLDR locales, such as en-fr")
    return to_config_dict(
        Config(
            name=f"translate_cldr_{source}_{target}{'_noisy' if noisy else ''}",
            model=ModelConfig(
                family="seq2seq",
                dim=128,
                encoder_layers=2,
                decoder_layers=2,
                num_heads=4,
                ffn_dim=344,
                max_length=64,
                tie_embeddings="all",
                dropout=0.0,
                **presets.LAYERS_OF_QWEN3,
            ),
            data=DataConfig(
                source="cldr_translation",
                source_language=source,
                target_language=target,
                tokenizer="bpe",
                vocab_size=1000,
                tokenizer_examples=20_000,
                split_digits=True,
                bucket_lengths=(7, 12, 22, 48),
                batch_tokens=2048,
                transforms=NOISE if noisy else (),
            ),
            optim=OptimConfig(
                optimizer="muon", schedule="cosine", learning_rate=3e-2, warmup_steps=50, final_fraction=0.0
            ),
            train=TrainConfig(steps=550, eval_every=275, checkpoint_every=275),
            eval=EvalConfig(batch_size=64, examples=500),
        )
    )
