"""Measures several systems in turn, so that changes of the machine's speed affect all of them."""

import time
from collections.abc import Callable, Mapping
from typing import Any

PAUSE = 0.3
"""Seconds before each measurement; idle threads of the previous system may spin this long."""


def alternate_runs(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Returns what each run returns, such as seconds, by round; the run that starts a round rotates."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            results[name].append(runs[name]())
    return results


def time_second_call(run: Callable[[], Any]) -> Callable[[], float]:
    """Returns a function that calls `run` twice and returns the seconds of the second call.

    The first call loads code and weights into the caches, which other systems have used since.
    """

    def seconds() -> float:
        run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds
