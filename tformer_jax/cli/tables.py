"""Tables on the terminal."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 160
"""Columns of tables where the output is not a terminal, so that signatures and paths stay whole."""


def table_console(kind: type[Console] = Console) -> Console:
    """Returns the console of a command that prints tables, as wide as the terminal or as the variable COLUMNS says."""
    at_terminal = sys.stdout is not None and sys.stdout.isatty()
    known = at_terminal or "COLUMNS" in os.environ
    return kind(highlight=False, emoji=False, width=None if known else WIDTH)


def make_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, **options: Any) -> Table:
    """Returns a table whose columns after the first `left` ones are right-aligned; `options` are rich's.

    Words that are too long for their column continue on the next line.
    """
    table = Table(*headings, **options)
    for number, column in enumerate(table.columns):
        column.overflow, column.justify = "fold", "left" if number < left else "right"
    for row in rows:
        table.add_row(*row)
    return table
