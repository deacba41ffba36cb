"""A small translation model on four devices: two share a batch, two share heads, FFNs and vocabulary."""

import dataclasses

from ml_collections import ConfigDict

from tests.runs.conftest import small_config
from tformer_jax.config import ParallelConfig, to_config_dict


def get_config() -> ConfigDict:
    """Returns the config for `tests.programs.processes`."""
    cfg = small_config(steps=8, eval_every=4, checkpoint_every=2, ema_decay=0.9)
    mesh = ParallelConfig(data=2, tensor=2, start_seconds=120, lost_seconds=20)
    return to_config_dict(dataclasses.replace(cfg, parallel=mesh))
