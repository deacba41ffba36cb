"""`--profile`: a trace of a few steps, for TensorBoard's profile page (XProf)."""

from pathlib import Path
from typing import Any

import jax

SKIPPED, TRACED = 10, 5
"""Steps before the trace, in which most shapes are compiled, and steps in it."""


class Profiler:
    """Writes the trace of some steps to a folder, where it is wanted."""

    def __init__(self, folder: Path, *, first_step: int, wanted: bool):
        self._folder, self._first, self._wanted = folder, first_step + SKIPPED, wanted
        self._tracing = False

    def after_step(self, step: int, state: Any) -> None:
        """Begins or ends the trace when it is time."""
        if self._wanted and step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif self._tracing and step == self._first + TRACED:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Ends a trace that goes on."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
