"""Fine-tuning of an imported encoder on movie-review sentences (Pang and Lee, 2005).

python scripts/import_hf.py CHECKPOINT --run runs/minilm
python scripts/train.py --config configs/finetune_rt_polarity.py:runs/minilm --data DIR

CHECKPOINT is a folder in Hugging Face's format. With sentence-transformers/all-MiniLM-L6-v2, expect an accuracy of
82 % (one seed) after 7 minutes on two CPU cores. `python -m tests.programs.pretrained` runs both commands.
"""

import dataclasses
from pathlib import Path

from bases import RT_POLARITY
from ml_collections import ConfigDict

from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, EvalConfig, OptimConfig, TrainConfig, to_config_dict


def get_config(run: str = "runs/minilm") -> ConfigDict:
    """Returns the config of the encoder and tokenizer of a classifier or masked language model, with a new head."""
    encoder = config.load(Path(run) / "config.json").model
    if encoder.family not in ("classifier", "masked_lm"):
        raise UserError(f"{run} is a {encoder.family}: name the run of a classifier or a masked language model")
    if encoder.family == "masked_lm":
        encoder = dataclasses.replace(encoder, family="classifier", head_transform=False, output_bias=False)
    return to_config_dict(
        Config(
            name="finetune_rt_polarity",
            model=dataclasses.replace(encoder, num_classes=None, pooling="mean", pooler=False),
            data=dataclasses.replace(
                RT_POLARITY,
                tokenizer="file",
                tokenizer_file=str(Path(run).resolve()),
                bucket_lengths=(20, 32, 48, 96),
                batch_tokens=1024,
            ),
            optim=OptimConfig(schedule="linear", learning_rate=1e-4, warmup_steps=50, weight_decay=0.01),
            train=TrainConfig(steps=600, eval_every=300, checkpoint_every=300, start_from=run),
            eval=EvalConfig(examples=0),
        )
    )
