"""Why a run that had begun cannot go on."""


class RunError(RuntimeError):
    """The message says what happened, and how to go on from the last good checkpoint."""
