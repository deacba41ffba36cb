"""Heat maps and line charts, as plain values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer_jax.base.numbers import significant

DIGITS = 5
"""Significant digits of the numbers in a figure."""


@dataclasses.dataclass(frozen=True)
class Heat:
    """A heat map."""

    title: str
    values: np.ndarray
    """float [rows, columns]; NaN is drawn in gray."""
    rows: Sequence[str]
    columns: Sequence[str]
    caption: str = ""
    texts: Sequence[Sequence[str]] | None = None
    """Text of each cell, instead of its value."""
    kind = "heat"

    def data(self) -> dict[str, Any]:
        """Returns what the page's script needs, ready for JSON."""
        return {"kind": self.kind, "z": numbers(self.values), "y": self.rows, "x": self.columns, "texts": self.texts}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the headings and rows of the table below the figure."""
        texts = self.texts or [[f"{value:.4g}" if value == value else "" for value in row] for row in self.values]
        return ["", *self.columns], [[name, *row] for name, row in zip(self.rows, texts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line, or points, of a chart."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    texts: Sequence[str] | None = None
    """Text of each point; the points are then drawn."""


@dataclasses.dataclass(frozen=True)
class Lines:
    """A line chart."""

    title: str
    curves: Sequence[Curve]
    x: str
    """What the horizontal axis shows."""
    y: str
    caption: str = ""
    log: str = ""
    """Axes with a logarithmic scale: "", "x", "y" or "xy"."""
    square: bool = False
    """Whether both axes have one unit of length."""
    kind = "lines"

    def data(self) -> dict[str, Any]:
        """Returns what the page's script needs, ready for JSON."""
        curves = [
            {"name": curve.name, "x": numbers(curve.x), "y": numbers(curve.y), "texts": curve.texts}
            for curve in self.curves
        ]
        return {"kind": self.kind, "curves": curves, "x": self.x, "y": self.y, "log": self.log, "square": self.square}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the headings and rows of the table below the figure."""
        rows = [
            [curve.name, *(f"{value:.4g}" for value in point), *([curve.texts[number]] if curve.texts else [""])]
            for curve in self.curves
            for number, point in enumerate(zip(curve.x, curve.y, strict=True))
        ]
        return ["line", self.x, self.y, ""], rows


def cell_texts(values: np.ndarray) -> list[list[str]]:
    """Formats the values of a heat map, float [rows, columns], as texts of its cells."""
    return [[f"{value:.3g}" for value in row] for row in values]


def numbers(values: Any) -> list[Any]:
    """Returns an array as nested lists for JSON, rounded to `DIGITS` significant digits; NaN becomes None."""
    return significant(np.asarray(values, np.float64).tolist(), DIGITS)
