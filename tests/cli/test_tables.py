"""Widths of tables on a terminal and elsewhere."""

import sys

from tformer_jax.cli.tables import WIDTH, table_console
from tformer_jax.runs.console import RunConsole


def test_only_a_terminal_or_the_variable_columns_make_tables_narrow(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert table_console(RunConsole).width == WIDTH
    monkeypatch.setenv("COLUMNS", "90")
    assert table_console().width == 90
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert table_console().width < WIDTH
