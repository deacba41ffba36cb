"""The errors that commands report in one sentence, and the causes of failed computations and writes."""

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence

LESS_MEMORY = "model.remat='nothing_saveable' or train.loss_chunk"
"""Settings with which a train step needs less device memory, and which a resumed run may change."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of writes to a disk, quota or file that is full."""


class UserError(ValueError):
    """A setting, flag, file or input is invalid; the message says which, why, and what to write instead."""


class RunError(RuntimeError):
    """A command cannot continue; the message gives the cause and a remedy."""


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note to an error of the block, which its traceback shows."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def first_line(error: BaseException | str, longest: int | None = 300) -> str:
    """Returns the first line of an error's message, shortened as by `one_line`, or the type of error without one."""
    return one_line((str(error).strip().splitlines() or [type(error).__name__])[0], longest)


def one_line(error: BaseException | str, longest: int | None = 300) -> str:
    """Returns an error's message as one line, up to `longest` characters and an ellipsis; None: whatever its length."""
    line = " ".join(str(error).split())
    return line if longest is None or len(line) <= longest else f"{line[:longest]}…"


def list_names(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Returns the first names for a message, and the number of those after `most`: "a, b and 3 more"."""
    rest = len(names) - most
    return separator.join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def out_of_memory(error: Exception) -> str | None:
    """Returns JAX's error as one line if a computation or its program does not fit in memory, else None."""
    return one_line(error) if "RESOURCE_EXHAUSTED" in str(error) else None


def cause_of_failed_write(error: Exception) -> tuple[str, bool]:
    """Returns the cause of a failed write as one line, and whether the disk or its permissions are the cause.

    Orbax and TensorStore raise various types.
    """
    reason = re.search(
        "No space left on device|Disk quota exceeded|File too large|Permission denied|Read-only file system", str(error)
    )
    return reason[0] if reason else first_line(error), reason is not None
