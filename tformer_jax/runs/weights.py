"""The final weights of a run: one set of parameters or the mean of several, stored apart from the checkpoints."""

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from tformer_jax.base.errors import RunError, UserError, cause_of_failed_write, first_line
from tformer_jax.base.paths import resolved
from tformer_jax.config import Config, TrainConfig
from tformer_jax.nn.quantized import is_quantized
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
from tformer_jax.runs import run_folder
from tformer_jax.runs.checkpoint import Checkpointer, array_checksums
from tformer_jax.runs.run_folder import weights_json, write_json
from tformer_jax.train import optimizers, parameters
from tformer_jax.train.state import TrainState

FOLDER = "weights"
LAST_STEP = ("last", "ema")
"""Choices of `train.weights` that evaluations during training use as well."""
UNTRAINED = ("imported", "trimmed", "extended", "saved", "quantized")
"""Kinds of weights of runs that another command than `train.py` made."""


def to_evaluate(cfg: Config, state: TrainState) -> Any:
    """Returns the parameters to evaluate during training.

    They are the EMA if `train.weights="ema"`, the average of a schedule-free optimizer, or the latest parameters.
    LoRA factors are merged into the kernels, with the shardings of the kernels.
    """
    params = adapted_to_evaluate(cfg, state)
    if not isinstance(params, parameters.Adapted):
        return params
    from tformer_jax.train import lora

    return lora.merged_on_device(params)


def adapted_to_evaluate(cfg: Config, state: TrainState) -> Any:
    """Returns the parameters to evaluate; with LoRA, a `parameters.Adapted`."""
    params = parameters.trainable(state.params)
    if cfg.train.weights == "ema":
        params = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), state.ema, params)
    else:
        params = optimizers.evaluation_params(state.opt_state, params)
    return parameters.with_trainable(state.params, params)


def final_params(cfg: Config, state: TrainState, checkpointer: Checkpointer) -> tuple[Any, list[int]]:
    """Returns the final weights that `train.weights` selects, and the steps that they come from.

    A damaged checkpoint is logged and replaced by the next one.

    Raises:
        UserError: all of their checkpoints are damaged, or no checkpoint has a finite score.
    """
    train = cfg.train
    if train.weights in LAST_STEP:
        return to_evaluate(cfg, state), [int(state.step)]
    checkpointer.wait()
    if train.weights == "average_last":
        last = int(state.step)
        steps = [step for step in checkpointer.steps() if step == last or step % train.checkpoint_every == 0]
    else:
        steps = checkpointer.best_steps()
        if not steps:
            raise train.error(
                "weights",
                f"no checkpoint of this run has a finite validation {train.metric} with these settings; write 'last'",
            )
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    used: list[int] = []

    def undamaged() -> Iterator[Any]:
        for place, step in enumerate(steps, start=1):
            try:
                params = restored(cfg, checkpointer, abstract, step)
            except UserError as error:
                if place == len(steps) and not used:
                    raise
                logging.getLogger(__name__).warning("%s; the final weights leave it out", error)
                continue
            used.append(step)
            yield params

    count = 1 if train.weights == "best" else train.average
    return mean(itertools.islice(undamaged(), count)), used


def shortage(train: TrainConfig, steps: list[int]) -> str | None:
    """Returns a warning if fewer checkpoints than `train.average` are averaged, else None."""
    if train.weights not in ("average_last", "average_best") or len(steps) >= train.average:
        return None
    return (
        f"train.weights={train.weights!r} averages {len(steps)} checkpoints instead of train.average={train.average}: "
        "this run has no others, because it ended early or was resumed with other settings"
    )


def restored(
    cfg: Config,
    checkpointer: Checkpointer,
    abstract: TrainState,
    step: int | None = None,
    select: Callable[[Config, TrainState], Any] = to_evaluate,
) -> Any:
    """Restores the parameters to evaluate from the checkpoint of `step` (None: the newest undamaged one).

    Nothing else is read: no moments of the optimizer, and the parameters or their EMA.

    Args:
        abstract: shapes, dtypes and shardings of the checkpoint's state (`state.abstract`).
        select: `to_evaluate` or `adapted_to_evaluate`.

    Raises:
        UserError: the checkpoint is damaged, or there is none.
    """
    needed = jax.tree.map(lambda _: ocp.PLACEHOLDER, abstract)
    if cfg.train.weights == "ema":
        needed = needed.replace(ema=abstract.ema)
        if cfg.train.lora_rank:
            needed = needed.replace(params=abstract.params)
    else:
        averages = optimizers.needed_to_evaluate(abstract.opt_state, ocp.PLACEHOLDER)
        needed = needed.replace(params=abstract.params, opt_state=averages)
    restored, _ = checkpointer.restore(needed) if step is None else checkpointer.restore_step(step, needed)
    return select(cfg, jax.tree.map(lambda leaf, read: leaf if read is ocp.PLACEHOLDER else read, abstract, restored))


def mean(trees: Any) -> Any:
    """Averages an iterable of trees in float32, one in memory at a time; leaves keep their dtypes."""
    total, count, dtypes = None, 0, None
    for tree in trees:
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, tree)
        tree = optax.tree.cast(tree, jnp.float32)
        total, count = tree if total is None else jax.tree.map(jnp.add, total, tree), count + 1
    return jax.tree.map(lambda leaf, dtype: (leaf / count).astype(dtype), total, dtypes)


def save(run: Path, params: Any, kind: str, steps: list[int], saved_step: int, group: ProcessGroup = SINGLE) -> None:
    """Writes the final weights to a run folder atomically, replacing earlier ones; each process writes its shards.

    `weights.json` holds a checksum of each file, which `load` verifies, and of each array. Equal weights stay as they
    are: files written again would have other checksums, by which students of a teacher know its weights.

    Args:
        kind: `train.weights`, or one of `UNTRAINED`.
        steps: steps of the checkpoints that the weights are computed from.
        saved_step: last step of the run.
        group: all processes of the run.

    Raises:
        RunError: the disk is full or not writable.
    """
    facts = {"weights": kind, "steps": steps, "at_step": saved_step, "arrays": array_checksums(params)}
    if group.from_first(lambda: _holds(run, facts)):
        return
    if group.first:
        weights_json(run).unlink(missing_ok=True)
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(resolved(run / FOLDER), params, force=True)
    except Exception as error:
        reason, of_disk = cause_of_failed_write(error)
        if not of_disk:
            raise
        flag = "" if kind in UNTRAINED else " with --resume"
        raise RunError(
            f"the weights could not be written to {run / FOLDER} ({reason}): free some space or restore write "
            f"permission, then repeat the command{flag}"
        ) from error
    if not group.first:
        return
    facts["checksums"] = checksums(run / FOLDER)
    stored = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    write_json(weights_json(run), {**facts, "kernels": "int8"} if stored else facts)


def _holds(run: Path, facts: Mapping[str, Any]) -> bool:
    """Returns whether a run has undamaged final weights with these facts."""
    with contextlib.suppress(UserError):
        if verify(run, None):
            saved = run_folder.read_json(weights_json(run))
            return all(saved.get(name) == value for name, value in facts.items())
    return False


def are_quantized(run: Path) -> bool:
    """Returns whether the final weights of a run have kernels that are stored as int8."""
    path = weights_json(run)
    return path.exists() and run_folder.read_json(path).get("kernels") == "int8"


def load(run: Path, abstract: Any, latest_step: int | None) -> Any | None:
    """Loads the weights that `save` wrote; None if there are none, or a newer checkpoint exists.

    Raises:
        UserError: they are damaged, or of another model.
    """
    if not verify(run, latest_step):
        return None
    with ocp.StandardCheckpointer() as reader:
        try:
            return reader.restore(resolved(run / FOLDER), abstract)
        except Exception as error:  # the files are intact
            raise UserError(
                f"{run / FOLDER} holds other parameters than this version's model ({first_line(error, 120)}): use the "
                f"version that {run / 'provenance.json'} names"
            ) from error


def verify(run: Path, latest_step: int | None) -> bool:
    """Returns whether `load` would find weights, after a comparison of their files with the checksums.

    Raises:
        UserError: they are damaged.
    """
    path = weights_json(run)
    if not path.exists():
        return False
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["at_step"] < (latest_step or 0):
            return False
        if facts["checksums"] != checksums(run / FOLDER):
            raise ValueError("the checksums of its files do not match")
    except Exception as error:  # also of a file that is no JSON, or lacks a key
        remedy = "restore it from a copy"
        if run_folder.holds_checkpoint(run):
            remedy = f"remove {path}, then the newest checkpoint is used"
        raise UserError(f"{run / FOLDER} is damaged ({first_line(error)}): {remedy}") from error
    return True


def checksums(folder: Path) -> dict[str, str]:
    """Returns the BLAKE2b hash of each file in `folder`, by relative path."""
    hashes = {}
    for path in sorted(_files(folder)):
        with path.open("rb") as file:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    return hashes


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():  # `epath` has no recursive glob
        yield from _files(path) if path.is_dir() else (path,)
