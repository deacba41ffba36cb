"""The parameters that a run delivers: one set, or the mean of several, kept apart from the checkpoints."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from tformer_jax.config import Config, ConfigError
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
from tformer_jax.train.checkpoint import Checkpointer
from tformer_jax.train.optimizers import evaluation_params
from tformer_jax.train.run_folder import weights_facts, write_json
from tformer_jax.train.state import TrainState

FOLDER = "weights"


def evaluated(cfg: Config, state: TrainState) -> Any:
    """The parameters to evaluate while training: the running mean with `train.weights="ema"`, else the last ones."""
    if cfg.train.weights == "ema":
        return jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), state.ema, state.params)
    return evaluation_params(state.opt_state, state.params)


def final_params(cfg: Config, state: TrainState, checkpointer: Checkpointer) -> tuple[Any, list[int]]:
    """What `train.weights` asks for, and the steps it is made of.

    Raises:
        ConfigError: a checkpoint of them is damaged.
    """
    train = cfg.train
    if train.weights in ("last", "ema"):
        return evaluated(cfg, state), [int(state.step)]
    checkpointer.wait()
    if train.weights == "average_last":
        last = int(state.step)
        steps = [step for step in checkpointer.steps() if step == last or step % train.checkpoint_every == 0]
    else:
        steps = checkpointer.best_steps()
    steps = steps[: 1 if train.weights == "best" else train.average]
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    return mean(evaluated(cfg, checkpointer.restore_step(step, abstract)[0]) for step in steps), steps


def mean(trees: Any) -> Any:
    """The mean of several trees of arrays, one in memory at a time, added up in float32, in their own dtype."""
    total, count, dtypes = None, 0, None
    for tree in trees:
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, tree)
        tree = optax.tree.cast(tree, jnp.float32)
        total, count = tree if total is None else jax.tree.map(jnp.add, total, tree), count + 1
    return jax.tree.map(lambda leaf, dtype: (leaf / count).astype(dtype), total, dtypes)


def save(run: Path, params: Any, kind: str, steps: list[int], at: int, group: ProcessGroup = SINGLE) -> None:
    """Writes them to a run folder, whole or not at all, in the place of earlier ones; each process what it holds.

    `weights.json` holds a checksum of each file, by which damage is noticed when they are read.
    """
    if group.first:
        weights_facts(run).unlink(missing_ok=True)
    with ocp.StandardCheckpointer() as writer:
        writer.save((run / FOLDER).absolute(), params, force=True)
    if not group.first:
        return
    facts = {"weights": kind, "steps": steps, "at_step": at, "checksums": _checksums(run / FOLDER)}
    write_json(weights_facts(run), facts)


def load(run: Path, abstract: Any, latest_step: int | None) -> Any | None:
    """What `save` wrote; None where there is nothing, or the run has gone on since.

    Raises:
        ConfigError: it is damaged.
    """
    path = weights_facts(run)
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["at_step"] < (latest_step or 0):
            return None
        if facts["checksums"] != _checksums(run / FOLDER):
            raise ValueError("its files have other checksums than when they were written")
        with ocp.StandardCheckpointer() as reader:
            return reader.restore((run / FOLDER).absolute(), abstract)
    except Exception as error:  # whatever Orbax and TensorStore raise for broken files
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise ConfigError(
            f"{run / FOLDER} is damaged ({reason}): remove {path}, then the newest checkpoint is used"
        ) from error


def _checksums(folder: Path) -> dict[str, str]:
    """The BLAKE2b hash of each file in `folder` by its relative path."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    return found
