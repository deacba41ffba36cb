"""The time that this process has spent compiling, which is in no rate and no estimate of the remaining time."""

import jax

EVENTS = "/jax/core/compile/"
"""Begin of the names under which JAX reports the seconds of tracing, lowering and compiling a function."""
_durations = [0.0]


def _add(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith(EVENTS):
        _durations[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_add)


def compile_seconds() -> float:
    """Returns the seconds spent so far."""
    return _durations[0]
