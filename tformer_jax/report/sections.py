"""The tables of a report, as plain values for its template."""

import dataclasses
import datetime
import itertools
import math
from collections.abc import Sequence
from typing import Any

from tformer_jax.config import Config
from tformer_jax.config.convert import flat_values
from tformer_jax.config.metrics import PER_TEXT_SIZE, base_metric, group_of_metric
from tformer_jax.report.bootstrap import Estimate, estimates
from tformer_jax.report.charts import better_of, order_metrics, title_of
from tformer_jax.report.outputs import Piece, choose_outputs, mark_differences
from tformer_jax.report.run import RunFiles, differing_keys
from tformer_jax.report.series import to_csv
from tformer_jax.tasks.evaluators.directions import signatures_of

ABSENT = "–"
LONGEST = 2000
"""Number of characters of a text that is shown; the CSV files have longer ones."""
MAX_CHARACTERS = 2**22
"""Maximum number of characters in the CSV file of the outputs of a split."""
SMALLEST_P = 0.001
"""Smallest p-value that is shown."""
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclasses.dataclass(frozen=True)
class MetricRow:
    """One metric of one run."""

    name: str
    number: int
    """Of the run, from 0."""
    validation: float | None
    """At the last evaluation."""
    saved: float | None
    """On the validation split, of the final weights if they are from other steps than the last."""
    best: float | None
    """None also for a function of `tj.train(metrics=)`, for which higher or lower values may be better."""
    best_step: int | None
    test: float | None
    intervals: dict[str, Estimate]
    """By split, "validation" or "test"."""


def facts(run: RunFiles) -> dict[str, str]:
    """Returns the key figures of a run, by label."""
    steps = f"{run.step:,} of {run.config['train.steps']:,}"
    parameters = run.result.get("parameters") or sum(run.model.get("parameters", {}).values())
    tokens, seconds = (run.result.get(name) or run.train.last(name) for name in ("tokens", "seconds"))
    return {
        "steps": steps,
        "tokens": format_count(tokens) if tokens else ABSENT,
        "time": format_duration(seconds) if seconds else ABSENT,
        "parameters": format_count(parameters) if parameters else ABSENT,
        "devices": run.provenance.get("hardware", {}).get("devices", ABSENT),
        "seed": str(run.config["seed"]),
    }


def metric_rows(runs: Sequence[RunFiles]) -> dict[str, list[MetricRow]]:
    """Returns the evaluation metrics of all runs by title, in the order of the charts."""
    intervals = [{split: estimates([outputs], run.task) for split, outputs in run.outputs.items()} for run in runs]
    splits = ("validation", "test")
    columns = {name for run in runs for split in splits for name in run.group(split).columns}
    directions = {name for run in runs for outputs in run.outputs.values() for name in outputs.directions}
    names = {name for name in columns if group_of_metric(name) not in directions}
    result = {}
    for name in order_metrics(names):
        rows = [_metric_row(run, number, name, intervals[number]) for number, run in enumerate(runs)]
        result[title_of(name)] = [row for row in rows if (row.validation, row.best, row.test) != (None, None, None)]
    return {title: rows for title, rows in result.items() if rows}


def _metric_row(
    run: RunFiles, number: int, name: str, estimates_by_split: dict[str, dict[str, list[Estimate]]]
) -> MetricRow:
    series, test = run.group("validation"), run.group("test")
    pairs = zip(series.columns.get(name, ()), series.steps, strict=False)
    points = [(value, int(step)) for value, step in pairs if value == value]
    choose_best = better_of([run], name)
    best, step = (None, None)
    if choose_best and points:
        best, step = choose_best(points, key=lambda point: point[0])
    current = {split: metrics for split, metrics in estimates_by_split.items() if run.is_current(split)}
    return MetricRow(
        name,
        number,
        series.final(name),
        run.result.get("validation", {}).get(name),
        None if best is None else float(best),
        step,
        test.final(name) if len(test.steps) else run.result.get("test", {}).get(name),
        {split: metrics[name][0] for split, metrics in current.items() if name in metrics},
    )


def signatures(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """Returns the distinct sacreBLEU signatures by metric, and how references were normalized, if they were."""
    distinct: dict[str, dict[str, None]] = {}
    for run in runs:
        evaluated = run.outputs[run.split].signatures if run.split else {}
        named = run.result.get("signatures") or evaluated
        for name in dict.fromkeys(map(base_metric, named)):
            title = "references normalized by" if name == "references" else title_of(name)
            for signature, directions in signatures_of(name, named).items():
                if (name, signature) != ("references", "raw"):
                    suffix = f" of {', '.join(directions)}" if directions else ""
                    distinct.setdefault(title, {})[signature + suffix] = None
    return {name: list(values) for name, values in distinct.items()}


@dataclasses.dataclass(frozen=True)
class Shown:
    """One output as it is shown."""

    number: int
    """Index of the example, from 1."""
    direction: str | None
    source: str
    reference: list[Piece]
    output: list[Piece]
    hit: bool
    quality: float | None
    score: float | None


def shown_outputs(run: RunFiles) -> dict[str, list[Shown]]:
    """Returns the chosen outputs of a run's split by group."""
    if run.split is None:
        return {}
    outputs = run.outputs[run.split]
    quality = outputs.quality(run.task)
    result = {}
    for group, places in choose_outputs(outputs, run.task).items():
        result[group.capitalize()] = [
            Shown(
                at + 1,
                outputs.directions[at],
                shorten_text(outputs.sources[at]),
                *_sides(run, shorten_text(outputs.references[at]), shorten_text(outputs.texts[at])),
                bool(outputs.hits[at]),
                float(quality[at]) if quality is not None and run.task.references == "texts" else None,
                outputs.scores[at],
            )
            for at in places
        ]
    return {group: shown for group, shown in result.items() if shown}


def _sides(run: RunFiles, reference: str, output: str) -> tuple[list[Piece], list[Piece]]:
    """Marks differences of translations; continuations and labels are shown without marks."""
    if run.task.references == "texts":
        return mark_differences(reference, output)
    return [(False, reference)], [(False, output)]


def settings(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns all settings by section, which settings differ between runs, and which differ from the default."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    sections: dict[str, list[str]] = {}
    for name in names:
        sections.setdefault(name.partition(".")[0] if "." in name else "run", []).append(name)
    plain = [{name: repr(value) for name, value in run.config.items()} for run in runs]
    default = {name: repr(value) for name, value in flat_values(Config.defaults()).items()}
    return {
        "sections": sections,
        "values": plain,
        "differing": differing_keys(plain),
        "changed": [name for name in names if any(row.get(name) != default.get(name) for row in plain)],
        "defaults": default,
    }


def environment(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """Returns command, revision, versions and hardware by label, one value per run."""
    rows = [_environment(run) for run in runs]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, ABSENT) for row in rows] for name in names}


def _environment(run: RunFiles) -> dict[str, str]:
    provenance = run.provenance
    backends = run.model.get("attention_backends", {}).values()
    return {
        "run folder": run.folder.name,
        "command": provenance.get("command", ABSENT),
        "revision": provenance.get("git_revision") or ABSENT,
        **{name: str(value) for name, value in provenance.get("hardware", {}).items()},
        "attention": ", ".join(sorted(set(backends))) or ABSENT,
        "python": provenance.get("python", ABSENT),
        **provenance.get("packages", {}),
    }


def parameters(runs: Sequence[RunFiles]) -> dict[str, list[int | None]]:
    """Returns the number of parameters of each run by module."""
    names = dict.fromkeys(name for run in runs for name in run.model.get("parameters", {}))
    return {name: [run.model.get("parameters", {}).get(name) for run in runs] for name in names}


def downloads(runs: Sequence[RunFiles]) -> list[tuple[int, str, str, str]]:
    """Returns the number of the run, the label, the file name and the contents of each CSV file."""
    tables = []
    for number, run in enumerate(runs):
        prefix = run.name.replace("/", "_")
        files = [
            (f"{group} metrics".capitalize(), f"{group}.csv", series.records()) for group, series in run.metrics.items()
        ]
        for split, outputs in run.outputs.items():
            columns: dict[str, list[Any]] = {
                "source": outputs.sources,
                "reference": outputs.references,
                "output": outputs.texts,
                "score": outputs.scores,
                **({"direction": outputs.directions} if any(outputs.directions) else {}),
            }
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            fitting = _fitting(rows)
            label = f"{split} outputs".capitalize()
            label += f" (the first {len(fitting):,} of {len(rows):,})" if len(fitting) < len(rows) else ""
            files.append((label, f"{split}_outputs.csv", fitting))
        tables += [(number, label, f"{prefix}_{file}", to_csv(rows)) for label, file, rows in files if rows]
    return tables


def _fitting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first rows that together have at most `MAX_CHARACTERS` characters."""
    sizes = itertools.accumulate(sum(len(value) for value in row.values() if isinstance(value, str)) for row in rows)
    return [row for row, size in zip(rows, sizes, strict=True) if size <= MAX_CHARACTERS]


def shorten_text(text: str, longest: int = LONGEST) -> str:
    """Returns the first `longest` characters of a text, with an ellipsis if it is longer."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def format_metric(value: float | None, name: str) -> str:
    """Formats a metric: percentages and perplexities with two decimals, losses with four; `ABSENT` if not finite."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.{_decimals(name)}f}"


def format_interval(estimate: Estimate, name: str) -> str:
    """Formats the interval of a metric, such as `29.31 to 30.02`; `ABSENT` if an end is not finite."""
    if not math.isfinite(estimate.low + estimate.high):
        return ABSENT
    return f"{format_metric(estimate.low, name)} to {format_metric(estimate.high, name)}"


def format_difference(value: float, name: str) -> str:
    """Formats a difference of a metric with its sign, and a proper minus; `ABSENT` if not finite."""
    if not math.isfinite(value):
        return ABSENT
    return f"{value:+.{_decimals(name)}f}".replace("-", "−")


def format_p_value(p: float) -> str:
    """Formats a p-value with three decimals, or as `< 0.001`: it is never 0."""
    return "< 0.001" if p < SMALLEST_P else f"{p:.3f}"


def _decimals(name: str) -> int:
    return 4 if base_metric(name) in ("loss", *PER_TEXT_SIZE) else 2


def format_count(number: float) -> str:
    """Formats a count with three significant digits, such as `4.35 M`."""
    if number < 1e4:
        return f"{number:,.0f}"
    rounded = float(f"{number:.3g}")
    size, unit = next((size, unit) for size, unit in UNITS if rounded >= size)
    return f"{rounded / size:g} {unit}"


def format_duration(seconds: float) -> str:
    """Formats seconds as `2 d 3:04:05`, `3:04:05`, `4:05` or, below 10 seconds, `1.2 s`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = datetime.timedelta(seconds=round(seconds))
    hours, rest = divmod(whole.seconds, 3600)
    clock = f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours or whole.days else f"{rest // 60}:{rest % 60:02}"
    return f"{whole.days} d {clock}" if whole.days else clock
