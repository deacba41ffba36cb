"""The training loop, which knows no file: whatever writes, prints or evaluates is one of its actions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from tformer_jax.config import Config
from tformer_jax.data.prefetch import Batch, Prefetched
from tformer_jax.train.meter import Meter
from tformer_jax.train.monitor import StepMonitor
from tformer_jax.train.state import TrainState
from tformer_jax.train.step import training_flops

Action = tuple[Callable[[int], bool], Callable[[], None]]
"""When an action is due, given the number of steps done, and the action."""


class Trainer:
    """The state of training, which `run` advances.

    Args:
        train_step: the jitted step: (state, batch, *taught_by) -> (state, metrics).
        place: puts a batch of this process onto its devices.
        taught_by: the parameters of the teacher; () without one.
        around_step: returns the context in which the step is called with a batch, and traced for its FLOPs.
    """

    def __init__(
        self,
        cfg: Config,
        train_step: Callable[..., Any],
        state: TrainState,
        batches: Prefetched,
        place: Callable[[Batch], Mapping[str, jax.Array]],
        *,
        meter: Meter,
        monitor: StepMonitor,
        taught_by: Sequence[Any] = (),
        around_step: Callable[[Mapping[str, jax.Array]], AbstractContextManager[None]] = lambda batch: nullcontext(),
    ):
        self.cfg, self.train_step, self.state, self.taught_by = cfg, train_step, state, taught_by
        self.batches, self.place, self.around_step = batches, place, around_step
        self.meter, self.monitor = meter, monitor
        self.step = int(state.step)

    def run(self, actions: Sequence[Action], ended: Callable[[], bool]) -> None:
        """Repeats the step, and runs the actions that are due after each one, in order, until `ended`.

        Does not wait for a step: the next batch is transferred to the device while this one is computed (`Meter.add`
        bounds the number of steps in flight).

        Raises:
            NotFinite: too many successive steps had a non-finite loss or gradient.
        """
        self.batches.take_waited()  # before the first step
        for batch in self._batches_until(ended):
            with self.around_step(batch):
                self.state, metrics = self.train_step(self.state, batch, *self.taught_by)
                flops = training_flops(self.cfg, batch)
            self.finish_step(batch, metrics, flops)
            for due, action in actions:
                if due(self.step):
                    action()

    def finish_step(self, batch: Mapping[str, jax.Array], metrics: Any, flops: float) -> None:
        """Counts a step, and checks the steps whose metrics are ready."""
        self.step += 1
        self.monitor.remember(self.step, batch)
        self.monitor.check(self.meter.add(metrics, flops=flops, waited=self.batches.take_waited()))

    def check_all(self) -> None:
        """Waits for all steps, and checks them."""
        self.monitor.check(self.meter.fetch_all())

    def _batches_until(self, ended: Callable[[], bool]) -> Iterator[Mapping[str, jax.Array]]:
        while not ended():
            yield self.place(next(self.batches))
