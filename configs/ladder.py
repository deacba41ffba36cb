"""From the layers of 2017, as PyTorch's `nn.Transformer` has them, to those of 2025, one change at a time.

python scripts/train.py --config configs/ladder.py:shakespeare:rope --data DIR
python scripts/sweep.py --config configs/ladder.py:shakespeare --data DIR --choose optim.learning_rate \
  --sweep "variant=2017,pre_norm,rmsnorm,swiglu,rope,gqa,qk_norm,tied,no_bias,cosine,muon; \
    optim.learning_rate=3e-3,1e-2; seed=0,1,2"

The variant is TASK:RUNG. A rung has the changes of all rungs before it; TASK alone is the last rung. `shakespeare` is
a character language model of the size of lm_tiny_shakespeare.py:cpu; `multi30k` translates English to German and is
scored by BLEU of greedy outputs. All rungs of a task have the same depth, width, steps and batches, thus the same
tokens. The learning rate of each is the better of two on the validation split, with one seed. The table of the sweep
also shows the validation metric after the training time of the fastest rung; comparable only with `--jobs 1`. The 44
runs took 45 minutes for `shakespeare` and 90 minutes for `multi30k`, on two CPU cores.

Tiny Shakespeare has one held-out part: learning rates are chosen on the data on which the results are measured. In
trials of 2,000 steps, 1e-3 was worse than 3e-3 on every rung up to `no_bias`.
"""

import dataclasses
from typing import Any

from bases import MULTI30K, TINY_SHAKESPEARE
from ml_collections import ConfigDict

from tformer_jax.base.errors import UserError
from tformer_jax.config import (
    Config,
    DecodeConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    to_config_dict,
)

MODEL_OF_2017 = {
    "decoder_layers": 4,
    "num_heads": 4,
    "dim": 128,
    "ffn_dim": 512,
    "max_length": 64,
    "norm_placement": "post",
    "norm": "layernorm",
    "position": "sinusoidal",
    "ffn": "mlp",
    "activation": "relu",
    "tie_embeddings": "none",
}
SHAKESPEARE = Config(
    model=ModelConfig(**MODEL_OF_2017 | {"family": "decoder_lm", "dropout": 0.0}),
    data=TINY_SHAKESPEARE,
    optim=OptimConfig(schedule="inverse_sqrt", learning_rate=3e-3, warmup_steps=100),
    train=TrainConfig(steps=1000, eval_every=100, checkpoint_every=1000),
    eval=EvalConfig(batch_size=128, examples=0, samples=0),
)
TRANSLATION = Config(
    model=ModelConfig(**MODEL_OF_2017 | {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}),
    data=dataclasses.replace(MULTI30K, tokenizer="bpe", vocab_size=4000),
    optim=SHAKESPEARE.optim,
    train=TrainConfig(steps=500, label_smoothing=0.1, metric="bleu", eval_every=100, checkpoint_every=1000),
    decode=DecodeConfig(max_new_tokens=64),
    eval=EvalConfig(batch_size=256, examples=0, samples=0),
)
TASKS = {"shakespeare": SHAKESPEARE, "multi30k": TRANSLATION}

Changes = dict[str, Any]
"""New values by setting, such as `model.norm`."""


def _rungs(start: ModelConfig) -> dict[str, Changes]:
    """Returns what each rung changes, in order."""
    return {
        "2017": {},
        "pre_norm": {"model.norm_placement": "pre"},
        "rmsnorm": {"model.norm": "rmsnorm"},
        # three matrices of two thirds of the width have the parameters of two
        "swiglu": {"model.ffn": "gated", "model.activation": "silu", "model.ffn_dim": 2 * start.ffn_dim // 3},
        "rope": {"model.position": "rotary"},
        "gqa": {"model.num_kv_heads": start.num_heads // 2},
        "qk_norm": {"model.qk_norm": True},
        "tied": {"model.tie_embeddings": "all" if start.family == "seq2seq" else "output"},
        "no_bias": {"model.attention_bias": (), "model.ffn_bias": False},
        "cosine": {"optim.schedule": "cosine", "optim.final_fraction": 0.0},
        "muon": {"optim.optimizer": "muon"},
    }


def get_config(variant: str = "shakespeare") -> ConfigDict:
    """Returns the config of TASK:RUNG, or of the last rung of TASK."""
    task, _, rung = variant.partition(":")
    syntax = f"write TASK:RUNG with TASK one of {', '.join(TASKS)}"
    if task not in TASKS:
        raise UserError(f"variant {variant!r} of configs/ladder.py: {syntax}")
    rungs = _rungs(TASKS[task].model)
    names = list(rungs)
    rung = rung or names[-1]
    if rung not in names:
        raise UserError(f"variant {variant!r} of configs/ladder.py: {syntax} and RUNG one of {', '.join(names)}")
    result = to_config_dict(dataclasses.replace(TASKS[task], name=f"ladder_{variant.replace(':', '_')}"))
    for name in names[: names.index(rung) + 1]:
        result.update_from_flattened_dict(rungs[name])
    return result
