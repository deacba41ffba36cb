"""Plot of a sweep's record by matplotlib: a metric against a numeric setting, or by variant."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.config.metrics import base_metric
from tformer_jax.report.charts import TITLES, title_of

FORMATS = (".svg", ".png", ".pdf")
Group = Mapping[str, Any]
Point = tuple[float, Group]
Lines = dict[str, list[Point]]
"""Points by the label of their line."""


def check_plot(path: Path) -> None:
    """Checks, before training, that a plot can be made.

    Raises:
        UserError: matplotlib is not installed, or the suffix of `path` is not one of `FORMATS`.
    """
    checks.require("--plot", ("matplotlib",), "report")
    if path.suffix not in FORMATS:
        raise UserError(f"--plot {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draws the means of the record's metric over seeds, with their 95 % intervals.

    With a numeric setting, the metric is drawn against the last such setting, on a logarithmic axis, with one line per
    combination of the other settings; if there are several others, with one panel per value of the first. Without one,
    the groups are drawn one below another. A setting that was chosen by validation counts as neither.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sweep", "font.size": 9})
    swept = _swept(record)
    numeric = [name for name, values in swept.items() if name != "variant" and all(map(_is_positive, values))]
    title, (_, unit) = title_of(record["metric"]), TITLES.get(base_metric(record["metric"]), ("", ""))
    label = f"{title} ({unit})" if unit else title
    if numeric:
        panels = _panels(record["groups"], numeric[-1], swept)
        figure = Figure(figsize=(1 + 3.2 * len(panels), 3), layout="constrained")
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (heading, lines) in zip(row, panels.items(), strict=True):
            _draw_lines(axes, lines, record["metric"])
            axes.set(title=heading, xscale="log", xlabel=numeric[-1])
        row[0].set_ylabel(label)
    else:
        figure = Figure(figsize=(5, 0.8 + 0.25 * len(record["groups"])), layout="constrained")
        axes = figure.subplots()
        _draw_rows(axes, record["groups"], swept, record["metric"])
        axes.set_xlabel(label)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _settings(group: Group) -> list[tuple[str, str]]:
    """Returns the names and values of a group's settings; variants have their position in the name."""
    parts = [part.partition("=") for part in group["settings"]]
    return [(name if name != "variant" else f"variant {place}", value) for place, (name, _, value) in enumerate(parts)]


def _swept(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the values of each setting that differs between groups, except the chosen one."""
    values: dict[str, list[str]] = {}
    for group in record["groups"]:
        for name, value in _settings(group):
            if name != record["chosen"] and value not in values.setdefault(name, []):
                values[name].append(value)
    return {name: distinct for name, distinct in values.items() if len(distinct) > 1}


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _label(group: Group, names: Sequence[str]) -> str:
    return ", ".join(_readable(name, value) for name, value in _settings(group) if name in names)


def _readable(name: str, value: str) -> str:
    return value if name.startswith("variant") else f"{name.rpartition('.')[2]} {value}"


def _panels(groups: Sequence[Group], x: str, swept: Mapping[str, Sequence[str]]) -> dict[str, Lines]:
    """Returns the lines of each panel, by its heading."""
    others = [name for name in swept if name != x]
    facets = others[:1] if len(others) > 1 else []
    panels: dict[str, Lines] = {}
    for group in groups:
        lines = panels.setdefault(_label(group, facets), {})
        point = float(dict(_settings(group))[x]), group
        lines.setdefault(_label(group, [name for name in others if name not in facets]), []).append(point)
    return panels


def _draw_lines(axes: Any, lines: Lines, metric: str) -> None:
    import matplotlib

    colors = matplotlib.colormaps["viridis"].resampled(len(lines) + 1)
    for number, (label, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda point: point[0])
        means = [_mean(group, metric) for _, group in points]
        bars = [_half_interval(group, metric) for _, group in points]
        axes.errorbar([x for x, _ in points], means, bars, color=colors(number), marker=".", label=label, capsize=2)
    if len(lines) > 1:
        axes.legend(frameon=False)


def _draw_rows(axes: Any, groups: Sequence[Group], swept: Mapping[str, Sequence[str]], metric: str) -> None:
    means = [_mean(group, metric) for group in groups]
    bars = [_half_interval(group, metric) for group in groups]
    axes.errorbar(means, range(len(groups)), xerr=bars, fmt="o", markersize=4, capsize=3)
    axes.set_yticks(range(len(groups)), [_label(group, list(swept)) for group in groups])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def _mean(group: Group, metric: str) -> float:
    """Returns the mean of a metric; NaN, which is not drawn, if a run has no finite value."""
    mean = group["mean"].get(metric)
    return math.nan if mean is None else mean


def _half_interval(group: Group, metric: str) -> float:
    """Returns half of the interval of a metric; NaN, which is not drawn, if there is none, as of a single seed."""
    half = group["interval"].get(metric)
    return math.nan if half is None else half
