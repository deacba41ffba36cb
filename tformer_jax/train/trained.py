"""A trained model, loaded from its run folder for inference."""

import dataclasses
from pathlib import Path
from typing import Any

from flax import linen as nn

from tformer_jax import config
from tformer_jax.config import Config, ConfigError, ParallelConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import optimizers, run_folder, state
from tformer_jax.train.checkpoint import Checkpointer


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with everything that belongs to it."""

    cfg: Config
    model: nn.Module
    params: Any
    tokenizers: Tokenizers
    labels: tuple[str, ...] | None


def load_trained(run: Path) -> Trained:
    """The newest checkpoint of a run, on the first device of this machine.

    Raises:
        ConfigError: `run` is not a run folder, or holds no checkpoint.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} does not exist; name the run folder that scripts/train.py printed")
    cfg = config.load(run / "config.json")
    if not run_folder.checkpoints(run).is_dir():
        raise ConfigError(f"{run} holds no checkpoint yet; train it first")
    model = registry.build(cfg.model)
    mesh = make_mesh(ParallelConfig(data=1))
    checkpointer = Checkpointer(run_folder.checkpoints(run), keep=cfg.train.keep_checkpoints)
    restored, _ = checkpointer.restore(state.abstract(model, optimizers.build(cfg), mesh))
    checkpointer.close()
    tokenizers = Tokenizers.load(run / "tokenizers")
    return Trained(cfg, model, restored.params, tokenizers, run_folder.load_labels(run))
