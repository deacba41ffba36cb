"""Tables of names and values for notebooks."""

import html
from collections.abc import Mapping
from typing import Any


def describe_html(values: Mapping[str, Any]) -> str:
    """Returns a table with a row for each value; whole numbers have separators of thousands."""
    texts = {name: f"{value:,}" if type(value) is int else str(value) for name, value in values.items()}
    rows = (f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in texts.items())
    return f"<table>{''.join(rows)}</table>"
