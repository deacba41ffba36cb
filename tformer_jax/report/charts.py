"""The lines and bars of a report's charts, as plain data for plotly.js."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tformer_jax.base.numbers import GIB, significant
from tformer_jax.config import kinds, lower_is_better
from tformer_jax.config.metrics import base_metric, group_of_metric
from tformer_jax.report.outputs import histogram
from tformer_jax.report.run import RunFiles
from tformer_jax.report.series import bucket_means, downsample_indices

AXES = ("step", "tokens", "seconds")
DIGITS = 6
"""Significant digits of the numbers in a chart; the CSV files have all digits."""
MARKED = ("stage", "spike", "skipped", "resume", "failed")
"""Kinds of events that charts of the loss and of the gradient norm mark; charts of evaluation metrics mark stages."""
TITLES = {
    "loss": ("Loss", "nats per label"),
    "nll": ("Negative log-likelihood", "nats per label"),
    "auxiliary_loss": ("Auxiliary loss", "of experts or guided alignment"),
    "learning_rate": ("Learning rate", ""),
    "tokens_per_second": ("Throughput", "tokens/s"),
    "utilization": ("Utilization", "% of the peak FLOP/s"),
    "flops_per_second": ("Model FLOP/s", ""),
    "grad_norm": ("Gradient norm", "before clipping"),
    "memory": ("Peak memory", "GiB"),
    "data_wait_percent": ("Waiting for data", "% of the time"),
    "skipped_steps": ("Skipped steps", "per record"),
    "noise_scale": ("Gradient noise scale", "labels"),
    "perplexity": ("Perplexity", ""),
    "bits_per_byte": ("Bits per byte", ""),
    "bits_per_character": ("Bits per character", ""),
    "bleu": ("BLEU", "%"),
    "chrf": ("chrF", "%"),
    "chrf++": ("chrF++", "%"),
    "spbleu": ("spBLEU", "%"),
    "ter": ("TER", "%"),
    "off_target": ("Off-target outputs", "%"),
    "exact_match": ("Exact match", "%"),
    "unknown_outputs": ("Outputs with unknown tokens", "%"),
    "placeholders_kept": ("Outputs with the placeholders of their source", "%"),
    "accuracy": ("Accuracy", "%"),
    "macro_f1": ("Macro F1", "%"),
    "token_accuracy": ("Token accuracy", "%"),
}
"""Title and unit of each metric, in the order of the report."""
LOGARITHMIC = ("grad_norm", "perplexity")
FROM_ZERO = ("tokens_per_second", "utilization", "flops_per_second", "memory", "data_wait_percent", "skipped_steps")
NOT_DRAWN = ("tokens", "seconds")


@dataclasses.dataclass
class Chart:
    """One chart. Lines share the axes that the reader chooses; bars have their own."""

    key: str
    title: str
    unit: str
    section: str
    """"training" or "evaluation"."""
    traces: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    marks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Events, as vertical lines."""
    kind: str = "lines"
    """"lines" or "bars"."""
    log: bool = False
    zero: bool = False
    """Whether the vertical axis begins at 0."""
    better: Callable[..., Any] | None = min
    """Chooses the extreme value that the summary names; None: it names both."""
    summary: str = ""
    """One sentence that says what the chart shows."""

    def data(self) -> dict[str, Any]:
        """Returns what the page's script needs, ready for JSON."""
        return {name: getattr(self, name) for name in ("key", "unit", "traces", "marks", "kind", "log", "zero")}


def all_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Returns the charts of the training and evaluation curves that the runs have, and of their outputs."""
    charts = [*_training(runs), *_layers(runs), *_evaluation(runs), *_histograms(runs)]
    for chart in charts:
        if chart.kind == "lines":
            chart.summary = _summary(chart)
    return charts


def _training(runs: Sequence[RunFiles]) -> Iterator[Chart]:
    unsmoothed = "nll" if any(run.nll_column == "nll" for run in runs) else "loss"
    drawn = [_drawn_columns(run, unsmoothed) for run in runs]
    for name in order_metrics({name for columns in drawn for name in columns if "/" not in name}):
        title, unit = TITLES.get(name, (_readable(name), ""))
        chart = Chart(name, title, unit, "training", log=name in LOGARITHMIC, zero=name in FROM_ZERO)
        for number, run in enumerate(runs):
            values = drawn[number].get(name)
            if values is not None and (name != "skipped_steps" or np.nan_to_num(values).any()):
                chart.traces.append(_line(run, number, run.train.steps, values, "training"))
        if name == unsmoothed:
            chart.traces += _validation_lines(runs, "loss")
        if name in ("loss", "grad_norm"):
            chart.marks = [mark for number, run in enumerate(runs) for mark in _marks(run, number)]
        if chart.traces:
            yield chart


def _layers(runs: Sequence[RunFiles]) -> Iterator[Chart]:
    """Yields a chart per run of the norms by layer, which `train.log_norms` records."""
    for prefix, title in (("grad_norm/", "Gradient norm by layer"), ("param_norm/", "Parameter norm by layer")):
        for number, run in enumerate(runs):
            names = [name for name in run.train.columns if name.startswith(prefix)]
            suffix = f" of {run.name}" if len(runs) > 1 else ""
            chart = Chart(f"{prefix[:-1]}_{number}", title + suffix, "", "training", log=True)
            for at, name in enumerate(names):
                line = _line(run, number, run.train.steps, run.train.columns[name], name.removeprefix(prefix))
                chart.traces.append(line | {"shade": at / max(len(names) - 1, 1)})
            if chart.traces:
                yield chart


def _evaluation(runs: Sequence[RunFiles]) -> Iterator[Chart]:
    names = {name for run in runs for name in run.group("validation").columns}
    for name in order_metrics({name for name in names if name != "loss" and not group_of_metric(name)}):
        title, unit = TITLES.get(name, (_readable(name), ""))
        lines = _validation_lines(runs, name)
        if lines:
            marks = [mark for number, run in enumerate(runs) for mark in _marks(run, number, ("stage",))]
            better = better_of(runs, name)
            log = name in LOGARITHMIC
            yield Chart(f"validation_{name}", title, unit, "evaluation", lines, marks, log=log, better=better)


def _histograms(runs: Sequence[RunFiles]) -> Iterator[Chart]:
    """Yields the distributions of lengths, of sentence chrF and of the model's scores, over the outputs of each run."""
    having = [(number, run, run.outputs[run.split]) for number, run in enumerate(runs) if run.split]
    if not having:
        return
    translations = [shown for shown in having if shown[1].task.references == "texts"]
    columns = [
        (number, run.name, np.array([*map(len, outputs.texts)])) for number, run, outputs in having if _has_lengths(run)
    ]
    if columns:
        outputs = next(outputs for _, run, outputs in having if _has_lengths(run))
        columns.append((-1, "references", np.array([*map(len, outputs.references)])))
        yield _bars("lengths", "Length of outputs", "characters", columns)
    columns = [(number, run.name, outputs.chrf) for number, run, outputs in translations if outputs.texts]
    if columns:
        yield _bars("sentence_chrf", "chrF by sentence", "%", columns)
    for references, title in (("texts", "Beam score"), ("labels", "Probability of the predicted label")):
        columns = [
            (number, run.name, np.array([score for score in outputs.scores if score is not None], np.float64))
            for number, run, outputs in having
            if run.task.references == references
        ]
        if any(len(column) for _, _, column in columns):
            yield _bars(f"scores_{references}", title, "", columns)


def _has_lengths(run: RunFiles) -> bool:
    return run.task.references != "labels" and bool(run.split and run.outputs[run.split].texts)


def _bars(key: str, title: str, unit: str, columns: Sequence[tuple[int, str, np.ndarray]]) -> Chart:
    edges, shares = histogram([column for _, _, column in columns])
    chart = Chart(key, title, unit, "outputs", kind="bars")
    for (number, name, column), share in zip(columns, shares, strict=True):
        chart.traces.append({"run": number, "name": name, "x": _numbers(edges), "y": _numbers(share)})
        if len(column):
            chart.summary += f"{name}: median {np.median(column):.4g}{f' {unit}' if unit else ''}. "
    return chart


def _line(run: RunFiles, number: int, steps: np.ndarray, values: np.ndarray, name: str) -> dict[str, Any]:
    places = downsample_indices(values)
    line: dict[str, Any] = {"run": number, "name": name, "y": _numbers(values[places])}
    line |= {axis: _numbers(run.axis(axis, steps[places])) for axis in AXES}
    if len(places) < len(values):
        line["mean"] = _numbers(bucket_means(values))
    return line


def _validation_lines(runs: Sequence[RunFiles], name: str) -> list[dict[str, Any]]:
    lines = []
    for number, run in enumerate(runs):
        series = run.group("validation")
        if name in series.columns:
            line = _line(run, number, series.steps, series.columns[name], "validation")
            lines.append(line | {"evaluation": True})
    return lines


def _marks(run: RunFiles, number: int, kinds: Sequence[str] = MARKED) -> list[dict[str, Any]]:
    marked = [event for event in run.events if event["kind"] in kinds]
    steps = np.array([event["step"] for event in marked], np.int64)
    places = [_numbers(run.axis(axis, steps)) for axis in AXES]
    return [
        {"run": number, "kind": event["kind"], "label": _label(event), **dict(zip(AXES, place, strict=True))}
        for event, *place in zip(marked, *places, strict=True)
    ]


def _label(event: Mapping[str, Any]) -> str:
    """Returns what a chart writes beside the mark of an event: the number of a stage."""
    return event["message"].partition(" of ")[0] if event["kind"] == "stage" else ""


def _drawn_columns(run: RunFiles, unsmoothed: str) -> dict[str, np.ndarray]:
    """Returns the training metrics: memory in GiB, and FLOP/s in percent of the devices' peak if it is known.

    Args:
        unsmoothed: name of the loss without label smoothing.
    """
    columns = {name: values for name, values in run.train.columns.items() if name not in NOT_DRAWN}
    if run.nll_column in columns:
        columns[unsmoothed] = columns.pop(run.nll_column)
    if (peak := run.model.get("peak_flops")) and "flops_per_second" in columns:
        columns["utilization"] = 100 * columns.pop("flops_per_second") / peak
    if "memory_bytes" in columns:
        columns["memory"] = columns.pop("memory_bytes") / GIB
    return columns


def order_metrics(names: set[str]) -> list[str]:
    """Returns names of metrics in the order of `TITLES`, then the others by name."""
    order = {name: place for place, name in enumerate(TITLES)}
    return sorted(names, key=lambda name: (order.get(base_metric(name), len(order)), name))


def better_of(runs: Sequence[RunFiles], metric: str) -> Callable[..., Any] | None:
    """Returns `min` or `max`, which chooses the best value of a metric; None for a function of `tj.train(metrics=)`."""
    declared = {name for run in runs for name in run.task.metrics}  # imports the modules that register metrics
    if base_metric(metric) not in {*TITLES, *kinds.METRICS, *declared}:
        return None
    return min if lower_is_better(metric) else max


def title_of(metric: str) -> str:
    """Returns the title of a metric, such as `chrF, to-en`."""
    base, _, group = metric.partition(":")
    title = TITLES.get(base, (base,))[0]
    return f"{title}, {group}" if group else title


def _readable(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _numbers(values: np.ndarray) -> list[float | int | None]:
    return significant(np.asarray(values, np.float64).tolist(), DIGITS)


def _summary(chart: Chart) -> str:
    parts = []
    for trace in chart.traces:
        points = [(y, x) for y, x in zip(trace["y"], trace["step"], strict=True) if y is not None]
        if points:
            last, step = points[-1]
            low, high = f"{min(points)[0]:.4g}", f"{max(points)[0]:.4g}"
            extreme = f"between {low} and {high}"
            if chart.better is not None:
                extreme = f"lowest {low}" if chart.better is min else f"highest {high}"
            parts.append(f"{trace['name']}: {last:.4g} at step {step:,}, {extreme}")
    return "; ".join(parts[:4]) + "."
