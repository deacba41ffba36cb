"""Checkpoints: the sharded state and everything on the host that must continue with it, saved atomically by Orbax."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from tformer_jax.config import ConfigError
from tformer_jax.train.state import TrainState


class Checkpointer:
    """Saves and restores `(state, host)` pairs below one folder, keeping the newest ones.

    `host` is a JSON-able dictionary: the data iterator's state and the run's counters. A save is asynchronous and
    becomes visible under its step only once it is complete.
    """

    def __init__(self, folder: Path, *, keep: int):
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        )

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None when there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, host: dict[str, Any]) -> None:
        """Starts saving; does nothing when `step` is already saved."""
        if step == self._manager.latest_step():
            return
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        )

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, with the shapes, dtypes and shardings of `abstract`.

        Raises:
            ConfigError: there is no checkpoint, or its arrays do not have these shapes.
        """
        step = self._require_step()
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore())
            )
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{self.folder / str(step)} does not hold this config's model: {reason}") from error
        return restored.state, restored.host

    def wait(self) -> None:
        """Blocks until every started save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for pending saves and releases the manager's threads."""
        self._manager.close()

    def _require_step(self) -> int:
        step = self.latest_step()
        if step is None:
            raise ConfigError(f"{self.folder} holds no checkpoint; train first, or name another run folder")
        return step
