"""An object for tests of `processes.Remote`. It does not import JAX, so that its process starts quickly."""

import os
import signal

from tformer_jax.base.errors import UserError


class Counter:
    """A running sum."""

    def __init__(self, start: int):
        if start < 0:
            raise UserError("start below 0")
        self.value = start

    def add(self, number: int) -> tuple[int, int]:
        self.value += number
        return os.getpid(), self.value

    def fail(self) -> None:
        raise ValueError("first line\nsecond line")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
