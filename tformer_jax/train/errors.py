"""The error of a training run that cannot continue, and the sign of a device without enough memory."""

LESS_MEMORY = "model.remat='nothing_saveable', train.accumulate or train.loss_chunk"
"""Settings with which a train step needs less device memory."""


class RunError(RuntimeError):
    """Raised when a training run cannot continue; the message gives the cause and a remedy."""


def out_of_memory(error: Exception) -> str | None:
    """Returns JAX's error as one line if a computation or its program does not fit in memory, else None."""
    return " ".join(str(error).split())[:300] if "RESOURCE_EXHAUSTED" in str(error) else None
