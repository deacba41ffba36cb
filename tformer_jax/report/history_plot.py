"""Curves of one run, drawn by matplotlib for notebooks."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base import checks
from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.config.fields import nearest
from tformer_jax.report.charts import LOGARITHMIC, TITLES, order_metrics

EVALUATED = "validation/"


@dataclasses.dataclass(frozen=True)
class Plot:
    """A drawn figure, which notebooks show; `figure` is matplotlib's."""

    figure: Any

    def save(self, path: str | Path) -> None:
        """Writes the figure in the format of the path's suffix."""
        self.figure.savefig(path)

    def _repr_html_(self) -> str:
        with io.StringIO() as file:
            self.figure.savefig(file, format="svg")
            return file.getvalue()[file.getvalue().index("<svg") :]


def plot_history(history: Mapping[str, np.ndarray], names: Sequence[str] = ()) -> Plot:
    """Draws metrics against steps, training and validation in one panel each.

    Args:
        history: columns of equal length, as `Run.history`.
        names: metrics, with or without `validation/`; default: the loss and up to three validation metrics.

    Raises:
        UserError: a metric is not in the history, it is empty, or matplotlib is not installed.
    """
    checks.require("a plot", ("matplotlib",), "report")
    from matplotlib.figure import Figure

    for name in names:
        check_type("a name", name, str, "names of metrics, as in plot('loss', 'bleu')")
    names = list(dict.fromkeys(name.removeprefix(EVALUATED) for name in names))
    if not any(map(len, history.values())):
        raise UserError("the history is empty: no metrics of this run were recorded")
    metrics = {name.removeprefix(EVALUATED) for name in history if "/" not in name or name.startswith(EVALUATED)}
    if unknown := next((name for name in names if name not in metrics - {"step"}), None):
        raise UserError(f"the history has no metric {unknown!r}{nearest(unknown, metrics - {'step'})}")
    evaluated = {name.removeprefix(EVALUATED) for name in history if name.startswith(EVALUATED)} - {"loss"}
    shown = [*names] or ["loss", *order_metrics(evaluated)[:3]]
    figure = Figure(figsize=(4 * len(shown), 2.8), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for label, column in (("training", name), ("validation", EVALUATED + name)):
            values = history.get(column, np.zeros(0))
            if (finite := np.isfinite(values)).any():
                marker = "." if finite.sum() < 30 else ""
                panel.plot(history["step"][finite], values[finite], label=label, marker=marker)
        title, unit = TITLES.get(name, (name, ""))
        panel.set_title(f"{title} ({unit})" if unit else title, fontsize=10)
        panel.set_xlabel("step")
        panel.set_yscale("log" if name in LOGARITHMIC else "linear")
        if panel.lines:
            panel.legend(fontsize=8)
    return Plot(figure)
