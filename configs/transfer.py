"""Transfer of the learning rate over width: the standard parameterization and muP (Tensor Programs V, 2022).

python scripts/train.py --config configs/transfer.py:mup:256 --data DIR
python scripts/sweep.py --config configs/transfer.py --data DIR --plot transfer.svg --sweep \
  "variant=standard,mup; variant=64,128,256,512; optim.learning_rate=1e-3,4e-3,1.6e-2"

The variant is PARAMETERIZATION:WIDTH. The model is a character language model of Tiny Shakespeare with four layers like
GPT-2's; the number of heads and the FFN width are proportional to the width. At width 64 both parameterizations are the
same. With muP, the best learning rate should not depend on the width. `--config.optim.optimizer=muon` trains with Muon.
"""

from bases import TINY_SHAKESPEARE
from ml_collections import ConfigDict

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict

BASE_DIM = 64
HEAD_DIM = 16


def get_config(variant: str = "mup:64") -> ConfigDict:
    """Returns the config of PARAMETERIZATION:WIDTH."""
    parameterization, _, width = variant.partition(":")
    if parameterization not in ("standard", "mup") or not width.isdecimal() or not int(width) or int(width) % HEAD_DIM:
        raise UserError(
            f"variant {variant!r} of configs/transfer.py: write standard or mup, a colon and a multiple of {HEAD_DIM}"
        )
    dim = int(width)
    return to_config_dict(
        Config(
            name=f"transfer_{parameterization}_{dim}",
            model=ModelConfig(
                family="decoder_lm",
                decoder_layers=4,
                num_heads=dim // HEAD_DIM,
                head_dim=HEAD_DIM,
                dim=dim,
                ffn_dim=4 * dim,
                max_length=64,
                position="learned",
                activation="gelu",
                scale_embeddings=False,
                initializer="normal",
                tie_embeddings="none",
                dropout=0.0,
                parameterization=parameterization,
                base_dim=BASE_DIM if parameterization == "mup" else None,
            ),
            data=TINY_SHAKESPEARE,
            optim=OptimConfig(
                schedule="cosine", learning_rate=4e-3, warmup_steps=100, final_fraction=0.0, beta2=0.99, eps=1e-8
            ),
            train=TrainConfig(steps=1000, eval_every=1000, checkpoint_every=1000),
            eval=EvalConfig(batch_size=128, examples=0, samples=0),
        )
    )
