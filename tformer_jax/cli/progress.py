"""Progress of a command, shown on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from tformer_jax.cli.inputs import Source


class LinesProgress:
    """Shows the number of completed lines, lines/s and, if the size of the input is known, the percentage read.

    Shows nothing if the console is not a terminal.
    """

    def __init__(self, source: Source, *, done: int, shown: bool = True, console: Console | None = None):
        console = console or Console(stderr=True)
        self._source, self._first, self._done = source, done, done
        self._shown = shown and console.is_terminal
        self._bar = Progress(
            TextColumn("{task.fields[lines]:,} lines"),
            TextColumn("{task.fields[speed]:,.0f} lines/s"),
            BarColumn(),
            TaskProgressColumn(show_speed=False),
            console=console,
            disable=not self._shown,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._bar.add_task("", total=source.size, lines=done, speed=0.0)

    def __enter__(self) -> "LinesProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Counts one more completed line."""
        self._done += 1
        if self._shown:
            elapsed = self._bar.tasks[0].elapsed or 0
            speed = (self._done - self._first) / elapsed if elapsed else 0
            self._bar.update(self._task, completed=self._source.position, lines=self._done, speed=speed)
