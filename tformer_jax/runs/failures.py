"""Explains computations that fail during a run."""

import contextlib
from collections.abc import Iterator

import jax

from tformer_jax.base.errors import FULL_DISK, LESS_MEMORY, RunError, first_line, out_of_memory
from tformer_jax.parallel.multihost import ProcessGroup

LOST_WORKER = "Worker process was terminated unexpectedly"
"""How Grain's error begins if a process of the loader was killed."""


@contextlib.contextmanager
def as_run_errors(group: ProcessGroup) -> Iterator[None]:
    """Turns a failure that the user can resolve into a `RunError` that explains it.

    These are a lack of memory, a full disk, a lost loader process and a failed collective. (`jax.distributed` ends all
    processes after the error of one.)
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise RunError(
            f"{error.filename or 'a file of the run'} cannot be written ({error.strerror}): free some space, then the "
            "same command with --resume continues from the last checkpoint"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        if reason := out_of_memory(error):
            raise RunError(
                f"the run does not fit in memory ({reason}): use --resume with more devices, {LESS_MEMORY}, or a "
                "smaller eval.batch_size if it failed in an evaluation; or start again with smaller batches "
                "(data.batch_tokens or data.batch_size) or train.accumulate"
            ) from error
        if group.count == 1:
            raise
        reason = first_line(error)
        raise RunError(
            f"a computation of {group.count} processes failed in process {group.index} ({reason}); if another process "
            "was lost, the same commands with --resume continue from the last checkpoint"
        ) from error
    except RuntimeError as error:
        if not str(error).startswith(LOST_WORKER):
            raise
        reason = str(error).partition(".")[0]
        raise RunError(
            f"the data loader failed ({reason}), often for lack of memory: free some; the same command with --resume "
            "continues from the last checkpoint (a new run may set fewer data.workers)"
        ) from error
