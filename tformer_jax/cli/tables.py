"""Tables on the terminal."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


def make_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, **options: Any) -> Table:
    """Returns a table whose columns after the first `left` ones are right-aligned; `options` are rich's."""
    table = Table(*headings, **options)
    for column in table.columns[left:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table
