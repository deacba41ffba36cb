"""Console output of runs."""

import os
import sys

from rich.console import Console


class RunConsole(Console):
    """A console whose reader may leave: a run goes on without its output."""

    def on_broken_pipe(self) -> None:
        """Discards all further output, where rich ends the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
