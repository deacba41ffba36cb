"""Tables on the terminal."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


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
