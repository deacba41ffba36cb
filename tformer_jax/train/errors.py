"""The error of a training run that cannot continue."""


class RunError(RuntimeError):
    """Raised when a training run cannot continue; the message gives the cause and a remedy."""
