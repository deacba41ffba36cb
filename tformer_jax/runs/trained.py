"""Loads the model of a run folder for inference."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from flax import linen as nn
from jax.sharding import Mesh

from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import first_device_mesh
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
from tformer_jax.runs import run_folder, weights
from tformer_jax.runs.checkpoint import Checkpointer
from tformer_jax.train import optimizers, state
from tformer_jax.train.parameters import Adapted


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model with its config, tokenizers and class labels."""

    cfg: Config
    model: nn.Module
    params: Any
    tokenizers: Tokenizers
    labels: tuple[str, ...] | None


def load_trained(
    run: Path, mesh: Mesh | None = None, group: ProcessGroup = SINGLE, *, step: int | None = None
) -> Trained:
    """Loads the final weights of a run, or its newest checkpoint if the run has not finished.

    Args:
        mesh: mesh that holds the parameters; None: the first local device.
        group: all processes of the mesh; each loads its own shards.
        step: load the checkpoint of this step instead: its parameters, their average if the optimizer is
            schedule-free, or their EMA if `train.weights="ema"`.

    Raises:
        UserError: `run` is not a run folder, has neither final weights nor a checkpoint, has no checkpoint of `step`,
            or is damaged.
    """
    if not run.is_dir():
        problem = "is a file" if run.is_file() else "does not exist"
        raise UserError(f"{run} {problem}; name the run folder that scripts/train.py printed")
    cfg = config.load(run / "config.json")
    if not run_folder.holds_weights(run):
        raise UserError(f"{run} holds no checkpoint yet; train it first")
    if step is not None:
        run_folder.check_step(run, step)
    model = registry.build(cfg.model)
    tokenizers, labels = Tokenizers.load(run / "tokenizers"), run_folder.load_labels(run)
    if labels is not None and len(labels) != cfg.model.num_classes:
        raise UserError(
            f"{run}/labels.json has {len(labels)} classes, not {cfg.model.num_classes}: restore it from a copy"
        )
    return Trained(cfg, model, _params(run, cfg, model, mesh or first_device_mesh(), group, step), tokenizers, labels)


def _params(run: Path, cfg: Config, model: nn.Module, mesh: Mesh, group: ProcessGroup, step: int | None) -> Any:
    abstract = registry.sharded_shapes(model, mesh, as_int8=weights.are_quantized(run))
    if not run_folder.checkpoints(run).is_dir():
        return weights.load(run, abstract, None)
    with contextlib.closing(Checkpointer(run_folder.checkpoints(run), group=group)) as checkpointer:
        params = weights.load(run, abstract, checkpointer.latest_step()) if step is None else None
        if params is not None:
            return params
        optimizer = optimizers.build_readable(cfg, registry.shapes(model))
        return weights.restored(cfg, checkpointer, state.abstract(model, optimizer, cfg, mesh), step)


def load_adapted(run: Path, cfg: Config, mesh: Mesh | None = None, step: int | None = None) -> Adapted:
    """Loads the weights that `load_trained` loads, but with LoRA's factors and the adapted parameters apart.

    Raises:
        UserError: the run was trained without LoRA, its weights are a mean of several checkpoints, whose update has
            a higher rank, or the checkpoint is gone.
    """
    if not cfg.train.lora_rank:
        raise UserError(f"{run} has no adapter: it was trained without train.lora_rank")
    facts = run_folder.weights_of(run, step)
    if len(facts["steps"]) > 1:
        raise UserError(f"{run} has no adapter: its weights are a mean of steps {facts['steps']}; name one by --step")
    run_folder.check_step(run, facts["steps"][0])
    with contextlib.closing(Checkpointer(run_folder.checkpoints(run))) as checkpointer:
        model = registry.build(cfg.model)
        optimizer = optimizers.build_readable(cfg, registry.shapes(model))
        abstract = state.abstract(model, optimizer, cfg, mesh or first_device_mesh())
        adapted: Adapted = weights.restored(cfg, checkpointer, abstract, facts["steps"][0], weights.adapted_to_evaluate)
        return adapted
