"""Traces a few train steps for TensorBoard's profile plugin, XProf (`--profile`)."""

from pathlib import Path
from typing import Any

import jax

from tformer_jax.base.numbers import counted

SKIPPED, TRACED = 10, 5
"""Number of steps before the trace, during which most shapes compile, and number of traced steps."""
NEEDED = SKIPPED + TRACED
"""Minimum number of steps of a run with a complete trace."""


class Profiler:
    """Writes a `jax.profiler` trace of `TRACED` steps to a folder if `wanted`."""

    def __init__(self, folder: Path, *, first_step: int, wanted: bool):
        self._folder, self._first, self._wanted = folder, first_step + SKIPPED, wanted
        self._tracing = False

    def shortage(self, steps: int) -> str | None:
        """Returns a warning if a run that ends after step `steps` has no complete trace, else None."""
        left = steps - self._first + SKIPPED
        if not self._wanted or left >= NEEDED:
            return None
        trace = "an incomplete trace" if left > SKIPPED else "no trace"
        too_few = counted(left, "step is", "steps are")
        return f"--profile writes {trace}: {too_few} left, and it needs {NEEDED}; increase train.steps"

    def after_step(self, step: int, state: Any) -> None:
        """Starts the trace after step `first_step + SKIPPED`, and stops it `TRACED` steps later."""
        if self._wanted and step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif self._tracing and step == self._first + TRACED:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Stops a running trace."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
