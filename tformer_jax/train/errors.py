"""The error of a command that cannot continue, and the causes of failed computations and writes."""

import errno
import re

from tformer_jax.config.fields import first_line, one_line

LESS_MEMORY = "model.remat='nothing_saveable' or train.loss_chunk"
"""Settings with which a train step needs less device memory, and which a resumed run may change."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of writes to a disk, quota or file that is full."""


class RunError(RuntimeError):
    """A command cannot continue; the message gives the cause and a remedy."""


def out_of_memory(error: Exception) -> str | None:
    """Returns JAX's error as one line if a computation or its program does not fit in memory, else None."""
    return one_line(error) if "RESOURCE_EXHAUSTED" in str(error) else None


def cause_of_failed_write(error: Exception) -> tuple[str, bool]:
    """Returns the cause of a failed write as one line, and whether the disk or its permissions are the cause.

    Orbax and TensorStore raise various types.
    """
    known = re.search(
        "No space left on device|Disk quota exceeded|File too large|Permission denied|Read-only file system", str(error)
    )
    return known[0] if known else first_line(error), known is not None
