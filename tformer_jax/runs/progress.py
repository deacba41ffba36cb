"""Shows the progress of a run: a progress bar on a terminal, plain lines elsewhere."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tformer_jax.base.numbers import GIB
from tformer_jax.config.metrics import group_of_metric
from tformer_jax.runs.console import RunConsole
from tformer_jax.tasks.evaluators.split import Sample

SHOWN_WAIT_PERCENT = 5
"""The wait for data is shown if it exceeds this percentage of the time."""
SHOWN_CLASSES = 5


@dataclasses.dataclass(frozen=True)
class TimeLeft:
    """Estimated time to the end of the run."""

    seconds: float
    is_whole: bool
    """Whether evaluations are included, which is so after the first one."""

    def __str__(self) -> str:
        duration = datetime.timedelta(seconds=round(self.seconds))
        if self.is_whole:
            return f"{duration} left"
        return f"more than {duration} left" if duration else "evaluations left"


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a run at one step, as shown to the user."""

    step: int
    metrics: Mapping[str, float]
    memory_bytes: int
    peak_flops: float | None
    """Peak FLOP/s of all devices; None if unknown."""
    next_evaluation: int | None
    time_left: TimeLeft

    def __str__(self) -> str:
        metrics = self.metrics
        losses = [f"{name} {metrics[name]:.4f}" for name in ("loss", "nll") if name in metrics]
        rates = [f"lr {metrics['learning_rate']:.2e}"] if "learning_rate" in metrics else []
        parts = [*losses, *rates]
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        speed = f"{with_prefix(metrics['flops_per_second'])}FLOP/s"
        if self.peak_flops:
            speed += f" ({100 * metrics['flops_per_second'] / self.peak_flops:.0f} %)"
        parts += [speed, f"{self.memory_bytes / GIB:.1f} GiB"]
        if metrics["data_wait_percent"] > SHOWN_WAIT_PERCENT:
            parts.append(f"{metrics['data_wait_percent']:.0f} % waiting for data")
        if metrics["skipped_steps"]:
            skipped = int(metrics["skipped_steps"])
            parts.append(f"{skipped:,} step{'s' * (skipped != 1)} skipped")
        if self.next_evaluation is not None:
            parts.append(f"evaluation at {self.next_evaluation:,}")
        return "  ".join(parts)


def describe_classes(names: Sequence[str] | None) -> str:
    """Returns the number and the first names of a classifier's classes, to be followed by other facts; "" for None."""
    if names is None:
        return ""
    more = ", ..." if len(names) > SHOWN_CLASSES else ""
    return f"{len(names)} classes ({', '.join(names[:SHOWN_CLASSES])}{more}), "


def with_prefix(number: float) -> str:
    """Formats a number with an SI prefix, such as `1.5 G` for 1.5e9."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {prefix}"
    return f"{number:.0f} "


class ProgressView:
    """Shows steps, loss, learning rate, tokens/s and the remaining time; prints evaluations above the bar."""

    def __init__(self, *, steps: int, console: Console | None = None):
        self.console = console or RunConsole(highlight=False)
        self._steps = steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=steps, figures="compiling")

    def __enter__(self) -> "ProgressView":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, figures: Figures) -> None:
        """Updates the bar; without a terminal, prints a line instead."""
        line = f"{figures}  {figures.time_left}"
        self._bar.update(self._task, completed=figures.step, figures=line)
        if not self.console.is_terminal:
            self.say(f"step {figures.step}/{self._steps}  {line}")

    def say(self, line: str) -> None:
        """Prints one line above the bar."""
        self.console.print(line, soft_wrap=True, markup=False, emoji=False)

    def evaluation(
        self, title: str, metrics: Mapping[str, float], samples: Sequence[Sample] = (), remarks: Sequence[str] = ()
    ) -> None:
        """Prints the metrics and samples of an evaluation, and remarks on them; metrics of directions are left out."""
        shown = {name: value for name, value in metrics.items() if not group_of_metric(name)}
        self.say(f"{title}: " + "  ".join(f"{name} {value:.4g}" for name, value in shown.items()))
        for remark in remarks:
            self.say(f"    {remark}")
        for sample in samples:
            for name in ("direction", "source", "reference", "output"):
                if (text := getattr(sample, name)) is not None:
                    self.say(f"    {name:<9} {text}")
