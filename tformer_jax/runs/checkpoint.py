"""Saves checkpoints of the sharded state and the host's state, atomically, with Orbax."""

import contextlib
import dataclasses
import json
import logging
import math
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from tformer_jax.base.errors import RunError, UserError, cause_of_failed_write, first_line
from tformer_jax.base.paths import resolved
from tformer_jax.base.workarounds import first_failure_of_checkpoints, silenced_orbax
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
from tformer_jax.runs import run_folder
from tformer_jax.train.optimizers import plain_array
from tformer_jax.train.state import TrainState

NOT_FINITE = -1e300
"""Score of a checkpoint whose metric is not finite; JSON has no infinity."""
DAMAGED = "damaged"
"""Name of the folder, beside the checkpoints, that damaged ones are moved to."""


class Checkpointer:
    """Saves and restores `(state, host)` pairs in one folder.

    `host` is a JSON-serializable dictionary: the data iterator's state and the run's counters. Saving is asynchronous,
    and a checkpoint becomes visible once it is complete. It stores a checksum of every array, which is verified when
    it is restored.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        every: int = 1,
        keep_best: int = 0,
        permanent_every: int = 0,
        seconds: int = 0,
        fingerprint: int = 0,
        group: ProcessGroup = SINGLE,
    ):
        """Opens the folder for writing; without `keep`, for reading.

        Args:
            keep: number of newest scheduled checkpoints to keep; the latest one is kept in any case.
            every: steps between scheduled checkpoints; interruptions, evaluations and the end save further ones.
            keep_best: number of best-scored checkpoints to keep as well.
            permanent_every: checkpoints at multiples of this many steps are never deleted; 0: none.
            seconds: age of the newest checkpoint at which another is `overdue`; 0: never.
            fingerprint: identifies the settings that scores depend on; scores saved with another one are ignored.
            group: all processes of the run; each saves and restores its own shards.
        """
        self.folder, self._group, self._seconds = resolved(folder), group, seconds
        self.fingerprint = fingerprint
        self._late_scores: dict[int, float] = {}
        self._saving = contextlib.ExitStack()
        if keep is None:
            options = ocp.CheckpointManagerOptions(
                read_only=True, save_interval_steps=0, create=False, best_fn=self._score
            )
        else:
            best = policies.BestN(get_metric_fn=self._score, n=keep_best, keep_checkpoints_without_metrics=False)
            scheduled = policies.EveryNSteps(interval_steps=every, max_to_keep=keep)
            permanent = [policies.EveryNSteps(interval_steps=permanent_every)] if permanent_every else []
            options = ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(1), scheduled, best, *permanent]),
                save_decision_policy=policies.ContinuousCheckpointingPolicy(minimum_interval_secs=seconds),
                best_fn=self._score,
                cleanup_tmp_directories=True,
            )
            self._saving.enter_context(first_failure_of_checkpoints())
        try:
            with silenced_orbax():  # it warns about `read_only`
                self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
        except ValueError as error:  # the manager reads the scores of all checkpoints when it is built
            path = next(filter(_is_damaged, self.folder.glob("*/metrics/metrics")), self.folder)
            raise UserError(
                f"{path} is damaged: move {path.parents[1]} elsewhere, to continue from the checkpoint before it"
            ) from error

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def overdue(self, step: int) -> bool:
        """Returns whether the newest checkpoint is older than `seconds`, or missing; the same in all processes."""
        return bool(self._seconds) and self._manager.should_save(step)

    def best_steps(self) -> list[int]:
        """Returns the steps of checkpoints with a finite score, best first; among equal scores, newest first."""
        saved = {step: self._score(metrics) for step in self.steps() if (metrics := self._manager.metrics(step))}
        scores = [(score, step) for step, score in (saved | self._late_scores).items() if score > NOT_FINITE]
        return [step for _, step in sorted(scores, reverse=True)]

    def save(self, step: int, state: TrainState, host: dict[str, Any], *, score: float | None = None) -> None:
        """Starts saving asynchronously; if `step` is already saved, only keeps the score, for `best_steps`.

        Args:
            score: quality of the state, higher is better; None if unknown.

        Raises:
            RunError: this checkpoint or the previous one could not be written.
        """
        metrics = None
        if score is not None:
            metrics = {"score": score if math.isfinite(score) else NOT_FINITE, "fingerprint": self.fingerprint}
        if step == self._manager.latest_step():
            self._late_scores = {step: metrics["score"]} if metrics else {}
            return
        self._late_scores.clear()  # of a checkpoint that may be deleted from now on
        sealed = {"host": host, "host_checksum": _text_checksum(host), "checksums": array_checksums(state)}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(sealed))
        try:
            with silenced_orbax():  # it warns about checkpoints without a score
                self._manager.save(step, args=args, metrics=metrics, force=True)
        except Exception as error:
            raise self._not_saved(error) from error

    def restore(self, abstract: TrainState, *, quarantine: bool = False) -> tuple[TrainState, dict[str, Any]]:
        """Restores the newest undamaged checkpoint, with the shapes, dtypes and shardings of `abstract`.

        Leaves of `abstract` that are `orbax.checkpoint.PLACEHOLDER` are neither read nor replaced. Damaged checkpoints
        are logged; with `quarantine`, they are also moved away, so that their steps can be saved again.

        Raises:
            UserError: there is no undamaged checkpoint, or its arrays have other shapes.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.folder} holds no checkpoint; train first, or name another run folder")
        for step, before in zip(steps, [*steps[1:], None], strict=True):
            try:
                restored = self.restore_step(step, abstract)
                break
            except UserError as error:
                if before is None:
                    raise
                logging.getLogger(__name__).warning("%s; going back to step %d", error, before)
        if quarantine and step != steps[0]:
            self._quarantine([damaged for damaged in steps if damaged > step])
        return restored

    def restore_step(self, step: int, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Restores the checkpoint of one step, as `restore`.

        Raises:
            UserError: it is damaged for one of the processes, or its arrays have other shapes than `abstract`.
        """
        path = self.folder / str(step)
        state, sealed = self._group.run(lambda: _read(path, abstract))
        if changed := _changed(state, sealed["checksums"]):
            raise UserError(f"{path} is damaged: the checksum of {changed[0]} does not match")
        return state, sealed["host"]

    def wait(self) -> None:
        """Blocks until all started saves are on disk.

        Raises:
            RunError: a save failed.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._not_saved(error) from error

    def close(self) -> None:
        """Closes the checkpoint manager and its threads."""
        try:
            self._manager.close()
            self._saving.close()
        except Exception as error:
            raise self._not_saved(error) from error

    def _score(self, metrics: dict[str, float]) -> float:
        comparable = metrics.get("fingerprint", self.fingerprint) == self.fingerprint
        return metrics["score"] if comparable else NOT_FINITE

    def _not_saved(self, error: Exception) -> RunError:
        self._saving.pop_all()  # what is dropped after a failure stays so
        reason, known = cause_of_failed_write(error)
        last = run_folder.latest_in(self.folder)
        intact = "there is no earlier one" if last is None else f"that of step {last} is intact"
        lost = not known and isinstance(error, jax.errors.JaxRuntimeError)
        remedy = "if a process was lost, restart all of them" if lost else "free some space or restore write permission"
        return RunError(
            f"a checkpoint could not be written to {self.folder} ({reason}); {intact}: {remedy}, then repeat the "
            "command with --resume"
        )

    def _quarantine(self, steps: list[int]) -> None:
        for step in steps if self._group.first else ():
            target = self.folder.parent / DAMAGED / str(step)
            while target.exists():
                target = target.with_name(f"{target.name}_")
            target.parent.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(target)
        self._group.barrier("damaged checkpoints are in quarantine")
        self._manager.reload()


def _read(path: Path, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads the shards of this process and the sealed host data of a checkpoint.

    Waits for no other process: one that cannot read its shards would leave the others in Orbax's barriers. If
    `abstract` has no optimizer state (`optimizers.build_readable`), the optimizer state is not read.

    Raises:
        UserError: the checkpoint is damaged, its arrays have other shapes than `abstract`, or averages that are left
            out are the parameters to evaluate.
    """
    tree: Any = abstract
    if partial := not jax.tree.leaves(abstract.opt_state):
        tree = {name: part for name, part in vars(abstract).items() if {*jax.tree.leaves(part)} - {ocp.PLACEHOLDER}}
    state = ocp.args.PyTreeRestore(tree, jax.tree.map(_restore_args, tree), partial_restore=partial)
    args = ocp.args.Composite(state=state, host=ocp.args.JsonRestore())
    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=alone))
    try:
        with first_failure_of_checkpoints(), ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            restored = reader.restore(path, args=args)
    except Exception as error:  # Orbax and TensorStore raise various types for damaged files
        reason = first_line(error.__cause__ or error, 200)  # the cause names the array
        raise UserError(f"{path} is damaged, or not of this config's model: {reason}") from error
    if not _is_intact(sealed := restored.host):
        raise UserError(f"{path} is damaged: the checksum of its host data does not match")
    if partial and any(name.endswith(".weight_sum") for name in sealed["checksums"]):
        reader = "tformer_jax.train(cfg, data=..., optimizer=..., resume=True)"
        raise UserError(f"{path} has the averages of a schedule-free optimizer of Python: only {reader} reads them")
    return dataclasses.replace(abstract, **restored.state) if partial else restored.state, sealed


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if leaf is ocp.PLACEHOLDER:
        return ocp.RestoreArgs()
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _is_intact(sealed: Any) -> bool:
    """Returns whether host data, read from JSON, has its fields and its checksum."""
    with contextlib.suppress(KeyError, TypeError):
        return _text_checksum(sealed["host"]) == sealed["host_checksum"] and isinstance(sealed["checksums"], dict)
    return False


def _text_checksum(host: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(host, sort_keys=True).encode())


def _changed(state: TrainState, saved: dict[str, int]) -> list[str]:
    """Returns the names of the arrays with other checksums than those saved.

    Earlier versions saved parameters that are always float32 now, such as routers, in the dtype of the others: an array
    that has its checksum after rounding to bfloat16 is unchanged.
    """

    def differing(state: TrainState) -> list[str]:
        return [name for name, checksum in array_checksums(state).items() if saved.get(name) != checksum]

    if not (changed := differing(state)):
        return []
    narrow = differing(jax.tree.map(_as_bfloat16, state))
    return [name for name in changed if name in narrow]


def _as_bfloat16(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if leaf is not ocp.PLACEHOLDER and leaf.dtype == jnp.float32 else leaf


def array_checksums(state: Any) -> dict[str, int]:
    """Returns a checksum of each array that is not a placeholder, by name, computed on the array's devices."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if leaf is not ocp.PLACEHOLDER}
    return {name: int(value) for name, value in jax.device_get(_sum_words(named)).items()}


@jax.jit
def _sum_words(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns `sum_i word_i * (2 i + 1)` modulo 2^32 over the words of each array, to detect changed or moved words."""

    def checksum(array: jax.Array) -> jax.Array:
        array = plain_array(array)
        array = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
        unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
        words = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
        position = jnp.zeros(words.shape, jnp.uint32)
        for axis, length in enumerate(words.shape):
            position = position * jnp.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        return (words * (2 * position + 1)).sum(dtype=jnp.uint32)

    return jax.tree.map(checksum, arrays)


def _is_damaged(path: Path) -> bool:
    """Returns whether a file is not JSON."""
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return True
    return False
