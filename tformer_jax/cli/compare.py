"""`scripts/compare.py`: shows what differs between two runs."""

import argparse
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from tformer_jax.base import checks
from tformer_jax.cli import report
from tformer_jax.cli.common import add_number, add_path, check_writable, new_parser, run_path
from tformer_jax.cli.tables import make_table, table_console
from tformer_jax.report import run
from tformer_jax.report.bootstrap import Estimate
from tformer_jax.report.charts import title_of
from tformer_jax.report.comparison import Change, Comparison, compare_runs
from tformer_jax.report.sections import (
    ABSENT,
    format_count,
    format_difference,
    format_duration,
    format_interval,
    format_metric,
    format_p_value,
)
from tformer_jax.tasks.task import Task

COMPARED = ("chrf", "bleu")
"""Metrics of the table of directions."""
AXES = {"step": "steps", "tokens": "tokens", "seconds": "time"}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the comparison; with `--report`, also writes the report of both runs."""
    options = parser().parse_args(argv)
    if options.report:
        checks.require_pages("--report")
        check_writable(options.report, "--report")
    folders = [options.baseline, options.run]
    a, b = run.load_all(folders, strict=True)
    console = table_console()
    for part in comparison_parts(compare_runs(a, b, options.resamples), options.sentences):
        console.print(part, end="\n\n", soft_wrap=isinstance(part, str), markup=not isinstance(part, str))
    if options.report:
        report.write_report(folders, options.report)


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "compare",
        "Compares two runs: metrics with a paired bootstrap test, losses at equal steps, tokens and time, "
        "settings, and the outputs that changed most.",
    )
    result.add_argument("baseline", type=run_path, metavar="RUN_A", help="run folder of the baseline")
    result.add_argument("run", type=run_path, metavar="RUN_B", help="run folder to compare with it")
    add_number(result, "--resamples", "bootstrap resamples", 1000, lowest=100)
    add_number(result, "--sentences", "outputs to show that changed most", 3, lowest=0)
    add_path(result, "--report", "also write the HTML report of both runs")
    return result


def comparison_parts(comparison: Comparison, sentences: int) -> list[Table | str]:
    """Returns the parts of a comparison, ready to print."""
    parts: list[Table | str] = [f"A  {comparison.a.name}\nB  {comparison.b.name}"]
    if comparison.metrics:
        parts.append(_metric_table(comparison))
        parts += [_direction_table(comparison)] if comparison.by_direction else []
    else:
        parts.append(comparison.why_unpaired("A", "B"))
    if comparison.losses:
        parts.append(_loss_table(comparison))
    parts.append(_setting_table(comparison) if comparison.settings else "All settings are equal.")
    for title, changes in (("gained most", comparison.gained), ("lost most", comparison.lost)):
        parts += [_describe_change(title, change, comparison.a.task) for change in changes[:sentences]]
    return parts


def _metric_table(comparison: Comparison) -> Table:
    steps = [f"{name}, step {step:,}" for name, step in zip("AB", comparison.steps, strict=True)]
    title = f"{comparison.split}: {comparison.example_counts}; 95 % intervals"
    table = _table(title, ["metric", steps[0], "", steps[1], "", "B - A", "p"])
    for name, (a, b) in comparison.overall.items():
        cells = [
            text
            for estimate in (a, b)
            for text in (format_metric(estimate.score, name), format_interval(estimate, name))
        ]
        table.add_row(title_of(name), *cells, *_tested(a, b, name))
    return table


def _direction_table(comparison: Comparison) -> Table:
    metrics = [name for name in COMPARED if any(name in estimates for estimates in comparison.by_direction.values())]
    headings = [heading for name in metrics for heading in (f"{title_of(name)} A", "B", "B - A", "p")]
    table = _table("by direction", ["direction", *headings])
    for direction, estimates in comparison.by_direction.items():
        cells = []
        for name in metrics:
            if name not in estimates:
                cells += [ABSENT] * 4
                continue
            a, b = estimates[name]
            cells += [format_metric(a.score, name), format_metric(b.score, name)]
            cells += _tested(a, b, name)
        table.add_row(direction, *cells)
    return table


def _tested(a: Estimate, b: Estimate, name: str) -> list[str]:
    """Returns the difference of a metric and its p-value, as text."""
    assert b.p_value is not None
    return [format_difference(b.score - a.score, name), format_p_value(b.p_value)]


def _loss_table(comparison: Comparison) -> Table:
    headings = ["at equal", "", "training A", "B", "B - A", "validation A", "B", "B - A"]
    table = _table(f"loss, interpolated between records{comparison.loss_remark}", headings)
    for row in comparison.losses:
        cells = [AXES[row.axis], format_duration(row.at) if row.axis == "seconds" else format_count(row.at)]
        for a, b in (row.train, row.validation):
            cells += [format_metric(a, "loss"), format_metric(b, "loss")]
            cells.append(
                ABSENT if a is None or b is None or not comparison.same_tokens else format_difference(b - a, "loss")
            )
        table.add_row(*cells)
    return table


def _setting_table(comparison: Comparison) -> Table:
    table = _table("settings that differ", ["setting", "A", "B"], left=3)
    for name, values in comparison.settings.items():
        table.add_row(name, *(escape(repr(value)) for value in values))
    return table


def _describe_change(title: str, change: Change, task: Task) -> str:
    a, b = (_describe_quality(value, task) for value in change.quality)
    lines = {"source": change.source, "reference": change.reference, "A": change.texts[0], "B": change.texts[1]}
    texts = "\n".join(f"    {name:<9} {text}" for name, text in lines.items())
    return f"{title}: {a} to {b}\n{texts}"


def _describe_quality(value: float, task: Task) -> str:
    """Formats what `Outputs.quality` returns."""
    if task.references == "texts":
        return f"chrF {value:.1f}"
    return f"{'correct' if value > 0 else 'wrong'} with probability {abs(value):.3g}"


def _table(title: str, headings: Sequence[str], *, left: int = 1) -> Table:
    return make_table(headings, (), left=left, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
